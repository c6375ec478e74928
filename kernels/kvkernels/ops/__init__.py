"""The kernels as torch operators of the namespace `warmroute`.

Owns: for each kernel its schema, a CPU implementation in plain torch (the oracle: short, float32
or float64 throughout), and the host's plans for kernels that need one.
Gives: `kvkernels.ops.append`; `kvkernels.ops.decode` with `decode_plan`, `prefill` with
`prefill_plan`, `shared_decode` with `shared_plan`, `copy_runs` with `relayout`, `w8a16`. This face
imports nothing: only the engine's model parts and the tests import what is below it.
Never imports: the engine, the router.
Start reading at: `operator.py`, then `append.py`.
"""
