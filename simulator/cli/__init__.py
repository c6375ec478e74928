"""The command line of `warmroute-sim`.

Owns: the commands, each beside its options (Structs, of which `flags.py` makes flags and help), and
the exit status.
Gives: `main`.
Never imports: torch; what a command needs is imported when that command runs.
Start reading at: `command_line.py`.
"""

from simulator.cli.command_line import main

__all__ = ["main"]
