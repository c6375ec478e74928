"""Step-time constants from measurements: an engine's step log, or a live engine that is probed.

Owns: observations, the fit, its errors.
Gives: `read_step_log`, `probe`, `fit`, and a profile that replays and timed workers can use.
Never imports: the replay, the reports, shells of the router or the engine.
Start reading at: `fit.py`.
"""
