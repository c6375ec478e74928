"""Replay results for people and programs: one row, a console table, a page, a file, a CSV.

Owns: the JSON schema of a replay and its hash, stages, seeds summed up, tables, plots of results,
observers that write down single requests and hot prefixes.
Gives: `row.summarize`, `aggregate.aggregate`, `console.print_report`, `progress.ProgressDisplay`,
`file.write_json`, `page.render_page` of `view.view`, `requests_csv.RequestsCsv`,
`prefixes.HotPrefixes`.
Never imports: simulator.limits, simulator.sweep, aiohttp, asyncio.
Start reading at: `row.py`.
"""
