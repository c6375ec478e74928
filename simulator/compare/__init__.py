"""Results of sweeps side by side: every rule against one of them, seed by seed.

Owns: reading files of results, ratios with intervals, collapsed seeds, saturation, how it is shown.
Gives: `command.run_compare(command, console)`.
Never imports: aiohttp, asyncio; the replay's loop.
Start reading at: `figures.py`, then `command.py`.
"""
