"""The client port: paths by an allow-list, the models, and by a key of its own all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiohttp import web

from router.http.answers import Answering, answered, errors_as_json, json_response
from router.http.door.lane import HOT
from router.http.errors import ClientError
from router.http.inference import Inference
from router.http.local_desk import LocalDesk
from router.http.paths import PATHS
from router.http.readiness import alive, ready


def client_app(
    inference: Inference, desk: LocalDesk, body_bytes: int, forwards: bool = False
) -> web.Application:
    """The application of the client port. `body_bytes` bounds a request's body; `forwards`: also
    paths that are not known here go to workers.
    """

    async def models(request: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": desk.cards()})

    async def model(request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        for card in desk.cards():
            if card["id"] == name:
                return json_response(card)
        why = f"the model {name[:200]!r} does not exist; GET /v1/models lists those that do"
        raise ClientError(404, why, "model", "model_not_found")

    async def health(request: web.Request) -> web.StreamResponse:
        return alive(desk)

    async def readiness(request: web.Request) -> web.StreamResponse:
        return ready(desk, request)

    async def other(request: web.Request) -> web.StreamResponse:
        if request.path in PATHS:
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        if request.path in ("/v1/models", "/health", "/ready"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET"])
        return await inference.handle(request)

    app = web.Application(client_max_size=body_bytes, middlewares=[errors_as_json(desk.faulty)])
    for path in PATHS:
        app.router.add_post(path, inference.handle)
    hot = partial(answered, handler=inference.handle, on_fault=desk.faulty)
    by_path: Mapping[str, Answering] = dict.fromkeys(PATHS, hot)
    app[HOT] = by_path
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", readiness)
    if forwards:
        app.router.add_route("*", "/{path:.*}", other)
    return app
