"""The client port: inference paths by an allow-list, nothing else."""

from __future__ import annotations

from aiohttp import web

from router.fleet_io.manager import FleetManager
from router.http.answers import error_response, errors_as_json, json_response
from router.http.inference import Inference
from router.metrics import RouterMetrics
from router.switchboard import Switchboard

INFERENCE_PATHS = ("/v1/completions", "/v1/chat/completions")


def client_app(
    inference: Inference,
    switchboard: Switchboard,
    fleet: FleetManager,
    metrics: RouterMetrics,
    body_bytes: int,
) -> web.Application:
    """The application of the client port. `body_bytes` bounds a request's body."""

    async def models(request: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": list(_models(fleet).values())})

    async def health(request: web.Request) -> web.StreamResponse:
        now_s = switchboard.clock()
        ready = sum(w.takes_requests(now_s) for w in switchboard.core.workers)
        if ready == 0:
            return error_response(503, "no worker takes requests", "no_worker_available")
        return json_response({"status": "ok", "ready_workers": ready})

    def refused(status: int) -> None:
        metrics.client_errors.labels(str(status)).inc()

    app = web.Application(client_max_size=body_bytes, middlewares=[errors_as_json(refused)])
    for path in INFERENCE_PATHS:
        app.router.add_post(path, inference.handle)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    return app


def _models(fleet: FleetManager) -> dict[str, dict[str, object]]:
    """Each model once, with the shortest limit of its workers."""
    models: dict[str, dict[str, object]] = {}
    limits: dict[str, list[int]] = {}
    for member in fleet.members.values():
        if member.recognized is None:
            continue
        facts = member.recognized.facts
        for name in facts.models:
            models.setdefault(name, {"id": name, "object": "model", "owned_by": "warmroute"})
            if facts.max_model_tokens is not None:
                limits.setdefault(name, []).append(facts.max_model_tokens)
    for name, known in limits.items():
        models[name]["max_model_len"] = min(known)
    return models
