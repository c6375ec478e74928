"""Sends one request to one worker, relays the reply, and gives an account of what happened.

Owns: the connections to workers, the framing of their replies, back-pressure, retry of a stale
connection, the count of events and the usage read from a reply's end.
Gives: `fallback.Upstream.send(request, sink, timeouts) -> Outcome`, and the same of
`native.NativeUpstream`, which lets a C++ thread do it where that can.
Never imports: router.core, prometheus_client.
Start reading at: `native.py`, then `fallback.py`; the types of requests and outcomes:
`router.http.reply`.
"""
