"""KV events from engines to the decision core.

Owns: where each worker's events are published, the ZMQ sockets and HTTP polls that read them,
replay and snapshot requests.
Gives: `feed.open_feed` and `feed.Feed`, one per worker; `sources.EventSource`,
`sources.RankedSources` and `sources.kv_event_sources`, which parse the endpoints that engines
announce.
Never imports: the HTTP front, policies' formulas, torch.
Start reading at: `feed.py`.
"""
