"""Adapters to engines, one file for each: they recognize an engine and read its load.

Owns: what each engine answers on which path, in all the versions we know; a worker as an operator
names it.
Gives: an `Adapter` for each, which makes a `Profile` and a `LoadReader`; `spec.WorkerSpec`.
Never imports: router.fleet, router.core, router.server.
Start reading at: `adapter.py`, then `vllm.py`.
"""
