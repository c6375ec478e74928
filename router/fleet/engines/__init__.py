"""One file an engine: how to recognize it, what it says of itself, how to read its load.

Owns: what each engine answers on which path, in all the versions we know.
Gives: an `Adapter` for each, which makes a `Profile` and a `LoadReader`.
Never imports: the members and the manager of the fleet, the core, the HTTP server.
Start reading at: `adapter.py`, then `vllm.py`.
"""
