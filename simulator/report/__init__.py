"""Replay results for people and programs: one row, a console table, a page, a CSV.

Owns: the JSON schema of a replay and its hash, tables and plots of results.
Gives: `summarize(result)`, and writers for each form.
Never imports: the replay's loop, anything that runs a request.
Start reading at: `row.py`.
"""
