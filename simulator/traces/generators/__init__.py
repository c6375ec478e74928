"""Generates workloads from a seed; requests are made one at a time, and none is stored.

Owns: shared prefixes as benchmark tools make them, Zipf groups, conversations, arrivals.
Gives: `table.GENERATORS`, each with its keys, their defaults and meanings.
Never imports: trace formats, anything that runs a request.
Start reading at: `table.py`.
"""
