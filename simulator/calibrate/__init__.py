"""The model beside the real thing: step-time constants from measurements, live beside simulated.

Owns: observations, the fit and its errors, the comparison of a live run with its replay.
Gives: `fit.calibrate`, `probe.probe`, `validate.validate`.
Never imports: shells of the router or the engine.
Start reading at: `fit.py`.
"""
