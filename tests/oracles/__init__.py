"""Plain-Python oracles of the native code: slow, plain and exact; only tests and benches use them.

Owns: what each native class and function of `kvkernels` must answer.
Gives: `index`, `event_batch`, `worker_blocks`, `mirror`, `prefix_owners`, `columns`.
Never imports: router, engine, simulator.
Start reading at: `index.py`.
"""
