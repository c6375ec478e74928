"""Learning: coefficients of the policy `learned`, searched for in replays.

Owns: the lessons (what is replayed), the objective, the search by CMA-ES, its journal, the result.
Gives: `command.run_learn(command, console)`, behind `warmroute-sim learn`.
Never imports: aiohttp, asyncio; the replay's loop, which `simulator.sweep` runs in processes.
Start reading at: `command.py`, then `objective.py`.
"""
