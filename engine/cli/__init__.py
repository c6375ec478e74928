"""`warmroute-engine`: starts workers, writes tiny checkpoints, measures kernels.

Owns: flags, exit codes, what is printed at the start.
Gives: `engine.cli.main.main`. This `__init__` imports nothing.
Never imports: the router, the simulator, policies; torch only once a model is served.
Start reading at: `main.py`.
"""
