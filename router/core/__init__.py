"""The decision core: facts in, actions out, no I/O.

Owns: what the router believes of its workers (load ledger, KV state, health) and the hold queue.
Gives: `RouterCore`, its `CoreSettings` and the actions it answers with (`router.core.actions`).
Never imports: asyncio, sockets, clocks, logging, random; nor any part of the router that does I/O.
Start reading at: `core.py`.
"""
