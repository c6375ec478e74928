"""Parses and writes HTTP/1.1 messages without I/O: requests, answers, heads, framing and errors.

Owns: strict parsing of both sides' bytes, refusals, error bodies, the types of a relayed reply.
Gives: `parser.RequestReader`, `messages.Request` and `Response`, `framing`, `reply.Outcome`, `tls`.
Never imports: router.core, router.request, router.server.
Start reading at: `messages.py`, then `parser.py`.
"""
