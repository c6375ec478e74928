"""Before the HTTP server: which connections are let in, which bytes are a request, and the serving
of those that are plain, so that most connections never have a server.

Owns: limits of connections, slow clients, one strict reading of requests, private headers, the
lane.
Gives: `door.Door`, `site.DoorSite`, `lane.HOT`.
Never imports: policies, router.core, the relay's connections.
Start reading at: `door.py`, then `connection.py`.
"""
