"""What is possible at all: hit rates without a clock, bounds, what hindsight achieves.

Owns: the hit-rate tables of routing rules, the offline optimum of a cache, lower bounds on times,
assignments found in hindsight, a policy's distance from both and where it loses.
Gives: `hits.hits` and `report.bound`, their rows as plain data, tables and a picture.
Never imports: shells of the router or the engine, sockets, clocks of the machine.
Start reading at: `hits.py`; for bounds `known.py`, then `floors.py` and `pooled.py`.
"""
