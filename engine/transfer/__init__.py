"""KV that moves from the worker that prefilled a prompt to the one that decodes its answer.

Owns: what both say to each other, both ends of a transfer, where KV is read from and written to.
Gives: `engine.transfer.ends.Exporter` and `Importer`, `engine.transfer.wire.TransferParams`,
`engine.transfer.store.KvStore`; `engine.transfer.memory` (torch) for KV that is there.
This `__init__` imports nothing.
Never imports: policies, the router, the server, aiohttp.
Start reading at: `ends.py`; the scheduler's part is `Scheduler.take_reads` and `engine/exports.py`.
"""
