"""Runs many replays: sweeps, plans, comparisons, advice, the study.

Owns: the sweep file, the executor, the file of results, plans, comparisons and advice.
Gives: `run_sweep`, `run_plan`, `run_compare`, `run_study`.
Never imports: simulator.live.
Start reading at: `sheet.py`, then `runs.py`.
"""
