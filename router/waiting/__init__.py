"""Holds requests of known models while no worker of their model takes requests.

Owns: which models are known though no worker serves them; the queue of waiting requests, by
priority and fair among tenants; how many of them are sent per second once a worker is there.
Gives: `queue.WorkerWait`, `known_models.KnownModels`, `settings.WaitingSettings`.
Never imports: sockets, HTTP, `router.request`, whose requests wait here before it asks the core.
Start reading at: `queue.py`.
"""
