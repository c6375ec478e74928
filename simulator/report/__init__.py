"""Results for people and programs: rows of figures, tables, pictures, one kind of page, files.

Owns: the JSON schema of a replay and its hash, figures with intervals over seeds, what a page holds
and its template, all plots, observers that write down single requests and hot prefixes.
Gives: `row.summarize`, `figures.FIGURES`, `page.Page` and `page.Table`, `plots`, and the page and
tables of replays.
Never imports: simulator.live, simulator.runs, simulator.limits, aiohttp, asyncio.
Start reading at: `row.py`, then `page.py`.
"""
