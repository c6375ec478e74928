"""Profiles of step times: from a config.json alone, and from tables of measured kernels.

Owns: the model's shape from a Hugging Face config.json, the GPUs' data sheets with the shares of
  them that kernels reach, the profile derived from both; the reader of kernel tables, the
  catalogue of built-in profiles, their fit and comparison.
Gives: `read_shape.read_shape`, `derive.derived`, `catalogue.fitted`, `compare.compare`,
  `tables.Tables`.
Never imports: the router, live parts of the simulator.
Start reading at: `derive.py` for a config.json, `tables.py` for tables.
"""
