"""The model: a Hugging Face folder in, logits out, over a paged KV cache.

Owns: configurations and checkpoints on disk, rotary tables, the KV tensor, paged attention and
what computes it, batch-invariant layers, the transformer of Llama, Qwen2 and Qwen3, its shards,
tiny checkpoints.
Gives: `engine.model.config.read_config`, `engine.model.checkpoint.Checkpoint`,
`engine.model.batch.FlatBatch`, `engine.model.kv_cache.KvCache`,
`engine.model.transformer.Transformer`, `engine.model.tiny.make_tiny`. This `__init__` imports
nothing; `config`, `kernel_choice` and `tiny` do without torch.
Never imports: the scheduler, the server, the router, asyncio.
Start reading at: `transformer.py`.
"""
