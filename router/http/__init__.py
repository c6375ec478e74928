"""HTTP/1.1 as values: requests, answers, heads, framing, errors; TLS files. It does no I/O.

Owns: strict parsing of both sides' bytes, refusals, error bodies, the types of a relayed reply.
Gives: `parser.RequestReader`, `messages.Request` and `Response`, `framing`, `reply.Outcome`, `tls`.
Never imports: router.core, router.request, router.server.
Start reading at: `messages.py`, then `parser.py`.
"""
