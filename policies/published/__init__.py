"""Routing policies that others have published, each as in its source.

Owns: one file per published policy, with the parameter names and defaults of its source.
Gives: nothing by itself; `policies.POLICIES` names each policy, `docs/catalogue.md` lists them.
Never imports: router, engine, simulator, kvkernels; only numpy, stdlib and other policies.
Start reading at: `trt_llm.py`, then `cache_aware.py`.

Each docstring has the formula, its source and year, and the spill depth: how many more unfinished
requests the holder of a prefix may have than an idle worker before the next request for the prefix
goes elsewhere. It also says how the policy treats unknown hits and missing signals.
"""
