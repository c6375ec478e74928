"""Serves a worker over HTTP and ZMQ, with any runner; from outside it looks like vLLM.

Owns: routes and bodies, answers in the making, KV event sockets and their buffer, counters.
Gives: `serving` (a worker inside a running loop), `serve` (until a signal), `WorkerSettings`.
Never imports: policies, the router, torch.
Start reading at: `worker.py`, which joins the parts; `app.py` lists the routes.
"""

from engine.server.run import serve, serving
from engine.server.settings import WorkerSettings

__all__ = ["WorkerSettings", "serve", "serving"]
