"""Several routers of the same workers, each of which knows what the others do.

Owns: what replicas say to each other, what is understood of it, and how it gets there (Redis).
Gives: `membership.Membership`, all of it for one router; `exchange.Exchange`; `sharing.Sharing`,
which is one, for a decision core; `lease.Leases`, of what only one may do; `redis_url`.
Never imports: policies' formulas, HTTP servers, torch.
Start reading at: `membership.py`; then `messages.py`, `voice.py` and `ear.py` for what is said, and
`link.py`, `connected.py` and `hearing.py` for how it gets there.
"""
