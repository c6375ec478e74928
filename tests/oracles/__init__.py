"""Plain-Python oracles of the native code: slow, simple and exact; only tests and benches use them.

Owns: the answer that each native class and function of `kvkernels` must give.
Gives: `index`, `event_batch`, `worker_blocks`, `mirror`, `prefix_owners`, `columns`, and others.
Start reading at: `index.py`.
"""
