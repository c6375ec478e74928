"""KV events from engines to the decision core.

Owns: where events are to be had, the ZMQ sockets and HTTP polls of each worker's event stream,
replay and snapshot requests.
Gives: `feed.open_feed` and `feed.Feed`, one per worker; `sources.EventSource`,
`sources.RankedSources` and `sources.kv_event_sources`: what engines say of their endpoints.
Never imports: the HTTP front, policies' formulas, torch.
Start reading at: `feed.py`.
"""
