"""One request to one worker: bytes out, bytes back, and an account of what happened.

Owns: the connections to workers, the framing of their replies, back-pressure, retry of a stale
connection, the count of events and the usage read from a reply's end.
Gives: `fallback.Upstream.send(request, sink, timeouts) -> Outcome`, and the same of
`native.NativeUpstream`, which has a thread of C++ do it where that can.
Never imports: router.core, prometheus_client.
Start reading at: `native.py`, then `fallback.py`; what goes in and comes out: `router.http.reply`.
"""
