"""Several routers of the same workers, each of which knows what the others do.

Owns: messages between replicas, membership, leases, snapshots lent to peers, the link to Redis.
Gives: `replica.Replica`, all of it for one router; `sharing.Sharing`, the exchange of one decision
core, without I/O; `lease.Leases`; `redis_url`.
Never imports: policies' formulas, HTTP servers, torch.
Start reading at: `replica.py`; `messages.py`, then `publisher.py` and `subscriber.py` for what
replicas tell each other; `link.py` for how it gets there.
"""
