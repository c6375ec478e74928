"""Replays requests through the real decision core and the real scheduler on virtual time.

Owns: the event loop of integer nanoseconds, the pool's world (delays, losses, faults), outcomes.
Gives: `run.replay(setup)`: one policy, one seed, one `ReplayResult`.
Never imports: the I/O parts of the router or the engine, sockets, clocks of the machine.
Start reading at: `run.py`, then `setup.py`.
"""
