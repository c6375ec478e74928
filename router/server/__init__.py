"""The HTTP server of both ports: listening, one strict reading of requests, limits, refusals, TLS.

Owns: both ports' sockets, limits of connections, slow clients, the parser, private headers.
Gives: `server.HttpServer`, `listener`, `client_port.ClientPort`, `messages.Request`, `Response`.
Never imports: policies, router.core.
Start reading at: `server.py`, then `parser.py`.
"""
