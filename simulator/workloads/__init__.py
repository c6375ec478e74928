"""Opens a workload by its name: the jobs of a trace file, or of a generator.

Owns: the mapping from names to readers and generators, with their options and help.
Gives: `open.open_jobs`.
Never imports: simulator.replay.
Start reading at: `open.py`.
"""
