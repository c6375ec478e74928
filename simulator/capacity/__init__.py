"""Capacity by arithmetic: how many requests workers take that prefill, decode, or do both.

Owns: the closed form of a worker's rate for a mix of requests, the best numbers of workers of each
role, and the front of throughput against speed.
Gives: `rates.prefill`, `rates.decode`, `rates.aggregated`, `pools.match`, `pools.pareto`.
Never imports: the router, sockets, clocks of the machine.
Start reading at: `rates.py`, then `pools.py`.
"""
