"""The configuration's keys: what may be set, with its unit, range, default and help.

Owns: every key; the names of its flag, its variable and its place in the file.
Gives: `schema.Config`, `keys`.
Never imports: the core, the fleet.
Start reading at: `schema.py`.
"""
