"""The engine's wire formats, for the engine that writes them and the router that reads them.

Owns: KV event batches and their ZMQ framing, the cache snapshot, metric names and the load in them,
chain seeds, tokenizers with chat templates. No sockets, no clocks.
Gives: what its modules name; only `hf.py` needs tokenizers and jinja2. This `__init__` imports
nothing.
Never imports: sockets, the scheduler, the server, torch.
Start reading at: `events.py`.
"""
