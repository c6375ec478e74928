"""One inference request: read, identified, decided, attempted, recorded.

Owns: paths, body reading, prompts and tokens, quotas, deadlines, attempts, explanations.
Gives: `inference.Inference.handle(request) -> response`.
Never imports: router.admin, router.replicas.
Start reading at: `inference.py`, then `attempts.py`.
"""
