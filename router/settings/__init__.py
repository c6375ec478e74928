"""One configuration: read from flags, environment and file, checked, and cut for each part.

Owns: the order of its sources, the rules of and between keys, which of them change in flight.
Gives: `load.load_config`, `rules`, `reload`, `terms`.
Never imports: router.cli, router.assembly.
Start reading at: `load.py`.
"""
