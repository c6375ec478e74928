"""KV events from engines to the decision core.

Owns: the ZMQ sockets of each worker's event stream, replay and snapshot requests.
Gives: `feed.EventFeed`, one per worker; `translate.facts_of`, wire batches as the core's facts.
Never imports: the HTTP front, policies' formulas, torch.
Start reading at: `feed.py`.
"""
