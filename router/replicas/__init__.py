"""Shares state between several routers in front of the same workers.

Owns: messages between replicas, membership, leases, snapshots lent to peers, the link to Redis.
Gives: `replica.Replica`, the whole sharing of one router; `sharing.Sharing`, the exchange of one
decision core's state, without I/O; `lease.Leases`.
Never imports: policies' formulas, HTTP servers, torch.
Start reading at: `replica.py`; then `messages.py`, `publisher.py` and `subscriber.py` for what
replicas send each other; `link.py` for how the messages travel.
"""
