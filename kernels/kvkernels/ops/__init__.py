"""The kernels as torch operators of the namespace `warmroute`.

Owns: for each kernel a CPU implementation in plain torch (the oracle: short, float32 or float64
throughout), whose signature is its schema, and the host's plan where it needs one.
Gives: `append`, `prefill`, `shared_decode`, `w8a16`, and `relayout` with `copy_runs`.
This `__init__` imports nothing: only the engine's model parts and the tests import what is below.
Never imports: the engine, the router.
Start reading at: `operator.py`, then `append.py`.
"""
