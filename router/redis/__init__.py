"""Gives access to Redis: parses its URL, opens connections, and describes its errors for people.

Owns: one server, sentinels or a cluster, as an operator writes them; keeping passwords out of all
messages.
Gives: `url.parse_redis_url`, `connection`.
Never imports: the rest of the router.
Start reading at: `url.py`.
"""
