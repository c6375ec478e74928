"""Serves an inference request: reads it, has the core choose a worker, sends it, and records it.

Owns: the order of one request's steps, prompts and tokens, quotas, deadlines, attempts.
Gives: `inference.Inference.handle(request) -> Answer`.
Never imports: router.admin, router.replicas.
Start reading at: `inference.py`, then `attempts.py`.
"""
