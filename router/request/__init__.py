"""One inference request: read, identified, decided, attempted, recorded.

Owns: the order of one request's steps, prompts and tokens, quotas, deadlines, attempts.
Gives: `inference.Inference.handle(request) -> Answer`.
Never imports: router.admin, router.replicas.
Start reading at: `inference.py`, then `attempts.py`.
"""
