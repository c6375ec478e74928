"""What the client port serves besides inference, namely models, health and readiness, and which
paths it lets through.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from router.request.errors import ClientError
from router.request.inference import Inference
from router.request.paths import PATHS
from router.request.service import Service
from router.server.responses import Answering, answered, errors_as_json, json_response
from router.server.server import HOT

_MODEL_CHARS = 1_024


def alive(service: Service) -> web.Response:
    """The answer to `/health`: 200, with how many workers take requests."""
    return json_response({"status": "ok", "ready_workers": service.ready_workers()})


def ready(service: Service, request: web.Request) -> web.Response:
    """The answer to `/ready`, or to `/ready?model=NAME`: 200 or 503, and the reasons.

    Raises ClientError.
    """
    model = request.query.get("model")
    if model is not None and len(model) > _MODEL_CHARS:
        raise ClientError(400, "`model` is too long", "model", "string_too_long")
    shown = readiness(service, model)
    return json_response(shown, 200 if shown["ready"] else 503)


def readiness(service: Service, model: str | None = None) -> dict[str, Any]:
    """What `/ready` says, of one model or of all."""
    reasons = list(service.reasons())
    by_model = service.ready_by_model()
    if model is not None:
        if model not in by_model:
            reasons.append(f"no worker serves the model {model!r}")
        elif not by_model[model]:
            reasons.append(f"no worker of the model {model!r} takes requests")
        by_model = {name: count for name, count in by_model.items() if name == model}
    elif not by_model:
        reasons.append("no worker is recognized")
    elif not any(by_model.values()):
        reasons.append("no worker takes requests")
    return {"ready": not reasons, "reasons": reasons, "ready_workers_by_model": by_model}


def client_app(
    inference: Inference, service: Service, body_bytes: int, forwards: bool = False
) -> web.Application:
    """The application of the client port. `body_bytes` bounds a request's body; `forwards`: also
    paths that are not known here go to workers.
    """

    async def models(request: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": service.cards()})

    async def model(request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        for card in service.cards():
            if card["id"] == name:
                return json_response(card)
        why = f"the model {name[:200]!r} does not exist; GET /v1/models lists those that do"
        raise ClientError(404, why, "model", "model_not_found")

    async def health(request: web.Request) -> web.StreamResponse:
        return alive(service)

    async def readiness(request: web.Request) -> web.StreamResponse:
        return ready(service, request)

    async def other(request: web.Request) -> web.StreamResponse:
        if request.path in PATHS:
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        if request.path in ("/v1/models", "/health", "/ready"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET"])
        return await inference.handle(request)

    app = web.Application(client_max_size=body_bytes, middlewares=[errors_as_json(service.faulty)])
    for path in PATHS:
        app.router.add_post(path, inference.handle)
    hot = partial(answered, handler=inference.handle, on_fault=service.faulty)
    by_path: Mapping[str, Answering] = dict.fromkeys(PATHS, hot)
    app[HOT] = by_path
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", readiness)
    if forwards:
        app.router.add_route("*", "/{path:.*}", other)
    return app
