"""One request to one worker: bytes out, bytes back, and an account of what happened.

Owns: the connections to workers, the framing of their replies, back-pressure, retry of a stale
connection, the count of events and the usage read from a reply's end.
Gives: `upstream.Upstream.send(request, sink, timeouts) -> reply.Outcome`, and the same of
`native.NativeUpstream`, which has a thread of C++ do it where that can.
Never imports: router.core, prometheus_client.
Start reading at: `reply.py` (what goes in and comes out), then `upstream.py` and `exchange.py`.

A reply's bytes travel from the worker's transport to the client's as they came. Only its head
is parsed; of a chunked body only the chunk sizes are looked at.
"""
