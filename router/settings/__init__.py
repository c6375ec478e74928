"""The configuration: read from flags, environment and file, checked, and cut for each part of the
router.

Owns: the order of its sources, the rules of and between keys, which of them a reload can change.
Gives: `load.load_config`, `rules`, `reload`, `terms`.
Never imports: router.cli, router.assembly.
Start reading at: `load.py`.
"""
