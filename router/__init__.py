"""The sidecar router: a request finds the worker whose KV cache is warm for it.

Owns: the decision core and the I/O around it (HTTP, KV events, the fleet), configuration, metrics.
Gives: the command `warmroute` (`cli/main.py`), and `router.core` to simulators.
Never imports: simulator, torch, engine.scheduler.scheduler, engine.block_pool, engine.server.
Start reading at: `assembly.py`, then `core/core.py`.
"""
