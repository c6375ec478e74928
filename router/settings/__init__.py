"""Loads the configuration from flags, environment and file, checks it, and makes the values that
each part of the router needs.

Owns: the order of its sources, the rules of and between keys, which of them a reload can change.
Gives: `load.load_config`, `rules`, `reload`, `terms`.
Never imports: router.cli, router.assembly.
Start reading at: `load.py`.
"""
