"""Starts real programs and sends them load over real HTTP.

Owns: starting programs, the load generator, the outcomes that clients saw, the demo.
Gives: `run_scenario`, `run_load`, `run_demo`.
Never imports: the I/O parts of the router or the engine; they run as processes.
Start reading at: `stack.py`, then `load.py`.
"""
