"""Whether the router is alive, and whether it should be sent requests: two questions.

`/health` is answered as long as somebody is there to answer. `/ready` says 200 only where a request
that came now would be placed, and else why not.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from router.http.answers import json_response
from router.http.errors import ClientError
from router.http.local_desk import LocalDesk

_MODEL_CHARS = 1_024


def alive(desk: LocalDesk) -> web.Response:
    """The answer to `/health`: 200, with how many workers take requests."""
    return json_response({"status": "ok", "ready_workers": desk.ready_workers()})


def ready(desk: LocalDesk, request: web.Request) -> web.Response:
    """The answer to `/ready`, or to `/ready?model=NAME`: 200 or 503, and the reasons.

    Raises ClientError.
    """
    model = request.query.get("model")
    if model is not None and len(model) > _MODEL_CHARS:
        raise ClientError(400, "`model` is too long", "model", "string_too_long")
    shown = readiness(desk, model)
    return json_response(shown, 200 if shown["ready"] else 503)


def readiness(desk: LocalDesk, model: str | None = None) -> dict[str, Any]:
    """What `/ready` says, of one model or of all."""
    reasons = list(desk.reasons())
    by_model = desk.ready_by_model()
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
