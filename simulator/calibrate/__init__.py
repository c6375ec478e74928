"""Step-time constants fitted to measurements, and live runs compared with their replays.

Owns: observations, the fit and its errors, the comparison of a live run with its replay.
Gives: `fit.calibrate`, `probe.probe`, `validate.validate`.
Never imports: the I/O parts of the router or the engine.
Start reading at: `fit.py`.
"""
