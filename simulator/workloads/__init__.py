"""A workload by its name: the jobs of a trace file, or of a generator.

Owns: which reader or generator a name means, with their options and help.
Gives: `open.open_jobs`.
Never imports: simulator.replay.
Start reading at: `open.py`.
"""
