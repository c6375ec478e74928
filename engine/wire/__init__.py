"""The engine's wire formats, for the engine that speaks them and the router that listens.

Owns: KV event batches and their ZMQ framing, the cache snapshot, metric names and the load in
them, chain seeds, tokenizers with chat templates. No sockets, no clocks.
Gives: what its modules name; of these `hf.py` alone brings tokenizers and jinja2. This face imports
nothing.
Never imports: sockets, the scheduler, the server, torch.
Start reading at: `events.py`.
"""
