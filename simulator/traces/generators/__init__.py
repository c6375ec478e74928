"""Workloads made up on the spot, from a seed: nothing is stored, one request is made at a time.

Owns: shared prefixes as benchmark tools make them, Zipf groups, conversations, arrivals.
Gives: `table.GENERATORS`, each with its keys, their defaults and meanings.
Never imports: trace formats, anything that runs a request.
Start reading at: `table.py`.
"""
