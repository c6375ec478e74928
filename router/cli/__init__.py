"""The command `warmroute` and its subcommands.

Owns: argument parsing, the process that serves, commands that ask a running router.
Gives: the script `warmroute`.
Never imports: simulator.
Start reading at: `main.py`, then `serve.py`.
"""
