"""The configuration: what may be set, where it is read from, which of it can change in flight.

Owns: every key with its unit, range and default; flags, variables and the file; the rules between
keys; the table in docs/reference/configuration.md.
Gives: `schema.Config`, `load`, `keys`, the command `config`.
Never imports: the core, HTTP, the fleet.
Start reading at: `schema.py`.
"""
