"""The HTTP server of both ports: listening, limits, slow clients, and the handler of each path.

Owns: both ports' sockets, limits of connections, slow clients, which peers are trusted.
Gives: `server.HttpServer`, `listener`, `client_port.ClientPort`.
Never imports: policies, router.core.
Start reading at: `server.py`, then `client_port.py`.
"""
