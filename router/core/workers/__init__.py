"""The core's account of workers: their table, their charges, and the KV that each holds.

Owns: the table of workers, the ledger of charges, KV state by their events or by a mirror, which
workers are busy or silent, the roles that a pool wants.
Gives: `table.WorkerTable`, `ledger.Ledger`, `kv_state`, `columns`, `mirror`.
Never imports: router.core.sessions, router.core.placement.
Start reading at: `table.py`, then `ledger.py`.
"""
