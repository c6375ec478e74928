"""Requests of known models that wait for a worker, because none of their model's takes requests.

Owns: which models are known though no worker serves them; the queue of those that wait, by
priority and fair among tenants; how many of them go per second once a worker is there.
Gives: `queue.WorkerWait`, `known_models.KnownModels`, `settings.WaitingSettings`.
Never imports: sockets, HTTP, `router.request`, which waits here before it asks the core.
Start reading at: `queue.py`.
"""
