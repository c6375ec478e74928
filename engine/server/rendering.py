"""Returns the token ids of requests to other programs, at vLLM's render paths; nothing is
computed.
"""

from __future__ import annotations

from aiohttp import web

from engine.server import bodies
from engine.server.admin import json_response
from engine.server.errors import ApiError
from engine.server.openai import WORKER, check_model, encoded_chat, tokens_of, truncated
from engine.server.worker import Worker


def routes() -> list[web.RouteDef]:
    """Return the routes of this module."""
    return [
        web.post("/v1/completions/render", render_completion),
        web.post("/v1/chat/completions/render", render_chat),
    ]


async def render_completion(http: web.Request) -> web.Response:
    """POST /v1/completions/render: return the token ids of each prompt."""
    worker = _renderer(http)
    body = bodies.decode(await http.read(), bodies.COMPLETION)
    check_model(worker, body.model)
    rendered = []
    for prompt in bodies.prompts_of(body.prompt):
        ids = truncated(await tokens_of(worker, prompt, body.add_special_tokens), worker, body)
        rendered.append({"token_ids": ids.tolist(), "features": None})
    return json_response(rendered)


async def render_chat(http: web.Request) -> web.Response:
    """POST /v1/chat/completions/render: return the token ids of a chat."""
    worker = _renderer(http)
    body = bodies.decode(await http.read(), bodies.CHAT)
    check_model(worker, body.model)
    ids = truncated(await encoded_chat(http, worker, bodies.chat_of(body)), worker, body)
    return json_response({"token_ids": ids.tolist(), "features": None})


def _renderer(http: web.Request) -> Worker:
    """Return the worker if it offers the render paths. Raises ApiError if it does not."""
    worker = http.app[WORKER]
    if not worker.settings.renders:
        raise ApiError(403, "this worker was started without --render")
    return worker
