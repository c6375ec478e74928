"""Routing rules that others have published, each as its source gives it.

Owns: one file per published rule, its parameters by the names and defaults of its source.
Gives: nothing from this face; `policies.POLICIES` names each one, `docs/catalogue.md` lists them.
Never imports: router, engine, simulator, kvkernels; only numpy, stdlib and other policies.
Start reading at: `trt_llm.py`, then `cache_aware.py`.

Each docstring says the formula, its source and year, the spill depth (how many more unfinished
requests the holder of a prefix may have than an idle worker before the next request for it goes
elsewhere), and what becomes of unknown hits and of signals nobody has given.
"""
