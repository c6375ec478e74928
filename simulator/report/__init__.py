"""Reports results to people and programs: rows of figures, tables, plots, HTML pages, files.

Owns: the JSON schema of a replay and its hash, figures with intervals over seeds, the content and
template of a page, all plots, observers that record single requests and hot prefixes.
Gives: `row.summarize`, `figures.FIGURES`, `page.Page` and `page.Table`, `plots`, and the page and
tables of replays.
Never imports: simulator.live, simulator.runs, simulator.limits, aiohttp, asyncio.
Start reading at: `row.py`, then `page.py`.
"""
