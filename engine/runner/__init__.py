"""The runner that computes: what the scheduler chose, through the model, to sampled tokens.

Owns: the step loop, batches of the scheduler's steps, what a failed step means; loading a folder.
Gives: `engine.runner.runner.RealRunner`, `engine.runner.load.load`.
This `__init__` imports nothing.
Never imports: the server, the router, aiohttp.
Start reading at: `runner.py`.
"""
