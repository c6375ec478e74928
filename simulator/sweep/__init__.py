"""Many replays at once: sweeps over what can be chosen, and the plan of the smallest fleet.

Owns: the sweep file, the processes that run replays, the file of results, Pareto fronts,
the search of a plan, and how both are shown.
Gives: `sheet.read_sheet(path)`, `run.sweep(setups, options, console)`, `plan.plan(request,
runs)`.
Never imports: aiohttp, asyncio; the replay's loop anywhere but in `evaluate.py`.
Start reading at: `sheet.py`, then `run.py`.
"""
