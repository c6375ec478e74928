"""Bounds: hit rates without service times, lower bounds on times, each policy's gap to them.

Owns: the hit-rate tables of routing rules, the offline optimum of a cache, lower bounds on times,
a policy's distance from them and where it loses.
Gives: `hits.hits` and `report.bound`, their rows as plain data, and tables.
Never imports: the I/O parts of the router or the engine, sockets, clocks of the machine.
Start reading at: `hits.py`; for bounds `work.py`, then `bounds.py`.
"""
