"""What a worker says of itself: health, load, its latest steps, why a request waits."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.explain import dominant
from engine.server.errors import ApiError
from engine.server.openai import WORKER
from engine.server.step_records import KEPT_STEPS

DEFAULT_STEPS = 100
_MAX_DIGITS = 6


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


async def health(http: web.Request) -> web.Response:
    """GET /health: 200 while requests are taken, 503 while shutting down.

    The body says what most of those that wait are waiting for (docs/why-is-it-not-batching.md).
    """
    worker = http.app[WORKER]
    scheduler = worker.runner.scheduler
    reason = dominant(scheduler)
    body = {
        "status": "stopping" if worker.draining else "ok",
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "waiting_for": reason.value if reason else None,
    }
    return json_response(body, 503 if worker.draining else 200)


async def metrics(http: web.Request) -> web.Response:
    """GET /metrics: Prometheus text."""
    text = http.app[WORKER].exposition.text()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=text, headers={"Content-Type": kind})


async def debug_steps(http: web.Request) -> web.Response:
    """GET /debug/steps?last=N: the latest N steps (100 unless told), oldest first."""
    asked = http.query.get("last", str(DEFAULT_STEPS))
    if not (asked.isascii() and asked.isdigit() and len(asked) <= _MAX_DIGITS):
        raise ApiError(400, f"last must be a number of steps, 0..{KEPT_STEPS}", "last")
    return json_response({"steps": http.app[WORKER].steps.last(int(asked))})


async def explain_request(http: web.Request) -> web.Response:
    """GET /explain/{request}: where an unfinished request stands, and why it waits.

    `request`: the id in its answer, or the X-Request-Id that it came with.
    """
    name = http.match_info["request"]
    found = http.app[WORKER].explain(name)
    if not found:
        raise ApiError(404, f"no unfinished request is called {name[:128]!r}")
    return json_response({"request": name, "sequences": found})
