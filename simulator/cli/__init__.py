"""The command line of `warmroute-sim`.

Owns: parsers and their options, what each command does, the exit status.
Gives: `main`.
Never imports: torch; what a command needs is imported when that command runs.
Start reading at: `command_line.py`.
"""

from simulator.cli.command_line import build_parser, main

__all__ = ["build_parser", "main"]
