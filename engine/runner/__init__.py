"""The runner that computes: takes the scheduler's steps through the model to sampled tokens.

Owns: the step loop, batches of the scheduler's steps, the handling of failed steps; loading a
folder.
Gives: `engine.runner.runner.RealRunner`, `engine.runner.load.load`. This `__init__` imports
nothing.
Never imports: the server, the router, aiohttp.
Start reading at: `runner.py`.
"""
