"""The command line of `warmroute-sim`.

Owns: the commands, each in one module with its options (Structs, from which `flags.py` makes flags
and help), and the exit status.
Gives: `main`.
Never imports: torch; a command's modules are imported only when that command runs.
Start reading at: `command_line.py`.
"""

from simulator.cli.command_line import main

__all__ = ["main"]
