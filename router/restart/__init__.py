"""Replaces a running router without a gap in listening, and saves caches for the next router.

Owns: the hand-over of sockets and knowledge between two routers, the old router's reports on its
requests until they end, the file of saved caches.
Gives: `cli.serve` both ends of a hot restart, `assembly` the keeper of saved caches.
Never imports: the client port, the link to Redis.
Start reading at: `hot_restart.py`.
"""
