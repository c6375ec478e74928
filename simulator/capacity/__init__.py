"""Capacity: the rates of prefill and decode workers, and the instances that a load needs.

Owns: the mix of a workload's requests, the closed form of a worker's rate for it, the best numbers
of workers of each role, the front of throughput against speed, and trials of them by replays; times
of batches by size, and instances of a model behind one queue.
Gives: `rates.prefill`, `rates.decode`, `rates.aggregated`, `pools.match`, `pools.pareto`,
`batches.fit`, `instances.Planner`.
Never imports: simulator.live, simulator.cli; sockets, clocks of the machine.
Start reading at: `rates.py`, then `pools.py`; for instances `batches.py`, then `instances.py`.
"""
