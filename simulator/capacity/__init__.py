"""Capacity by arithmetic: how many requests workers take that prefill, decode, or do both.

Owns: the mix of a workload's requests, the closed form of a worker's rate for it, the best numbers
of workers of each role, the front of throughput against speed, and trials of them by replays.
Gives: `rates.prefill`, `rates.decode`, `rates.aggregated`, `pools.match`, `pools.pareto`.
Never imports: simulator.live, simulator.cli; sockets, clocks of the machine.
Start reading at: `rates.py`, then `pools.py`.
"""
