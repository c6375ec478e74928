"""All routes of a worker, and the form of its errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from engine.server import admin, bodies, rendering, triton
from engine.server.admin import json_response
from engine.server.errors import ApiError
from engine.server.openai import WORKER, chat_completions, check_model, completions
from engine.server.worker import Worker
from engine.wire.tokens import PromptError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(worker: Worker) -> web.Application:
    """Return the application that serves `worker`."""
    app = web.Application(
        client_max_size=worker.settings.max_body_bytes, middlewares=[errors_as_json]
    )
    app[WORKER] = worker
    routes = (
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.get("/v1/models", models),
        web.get("/version", show_version),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.get("/kv_event_sources", kv_event_sources),
        web.get("/kv_snapshot", kv_snapshot),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        *admin.routes(),
        *rendering.routes(),
        *triton.routes(),
        web.route("*", "/{path:.*}", absent),
    )
    for route in routes:
        # aiohttp's own handler quotes the expectation in its reply, which some bytes break.
        more = route.kwargs | {"expect_handler": expect_continue}
        web.RouteDef(route.method, route.path, route.handler, more).register(app.router)
    return app


async def expect_continue(http: web.Request) -> web.Response | None:
    """Answer the header `Expect: 100-continue` before the body is read; refuse other
    expectations.
    """
    if http.version < (1, 1):
        return None
    if http.headers.get("Expect", "").lower() != "100-continue":
        return ApiError(417, "100-continue is all that may be expected here").response()
    await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    http.writer.output_size = 0  # the answer's head is not sent yet
    return None


async def absent(http: web.Request) -> web.Response:
    """Answer a request whose path does not exist (404), or exists only for other methods (405).
    Raises ApiError.
    """
    allowed: set[str] = set()
    for resource in http.app.router.resources():
        _, methods = await resource.resolve(http)
        allowed |= methods - {"*"}
    if allowed:
        raise ApiError(405, f"{http.path[:200]} takes {', '.join(sorted(allowed))}")
    raise ApiError(404, f"no such path: {http.path[:200]}")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the JSON of OpenAI's API, or of Triton's; an unexpected exception
    remains an error 500.
    """
    try:
        return await handler(request)
    except ApiError as raised:
        error = raised
    except PromptError as raised:
        error = ApiError(400, str(raised), raised.param)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[WORKER].settings.max_body_bytes
        error = ApiError(413, f"the body exceeds {limit} bytes")
    except ConnectionResetError:
        return web.Response()  # the client has left: no answer is read, and no error occurred
    if request.path.startswith("/v2/"):
        return json_response({"error": error.message}, error.status)
    return error.response()


async def models(http: web.Request) -> web.Response:
    """GET /v1/models: return the one model that the worker serves."""
    worker = http.app[WORKER]
    card = {
        "id": worker.model,
        "object": "model",
        "created": 0,
        "owned_by": "warmroute",
        "root": worker.model,
        "parent": None,
        "max_model_len": worker.max_model_tokens,
    }
    return json_response({"object": "list", "data": [card]})


async def show_version(http: web.Request) -> web.Response:
    """GET /version: return the version of warmroute, and the source's revision if it is known."""
    try:
        number = version("warmroute")
    except PackageNotFoundError:  # run from a checkout that was never installed
        number = "unknown"
    revision = http.app[WORKER].settings.revision
    told = {} if revision is None else {"revision": revision}
    return json_response({"version": number, "engine": "warmroute", **told})


async def tokenize(http: web.Request) -> web.Response:
    """POST /tokenize: return the token ids of a prompt, or of messages through the chat
    template.
    """
    worker = http.app[WORKER]
    body = bodies.decode(await http.read(), bodies.TOKENIZE)
    check_model(worker, body.model)
    if body.messages is not None:
        chat = bodies.chat_of(body)
        ids = await asyncio.to_thread(worker.tokenizer.encode_chat, chat, time.time())
    elif body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(worker.tokenizer.encode, body.prompt, special)
    else:
        raise ApiError(400, "give prompt or messages", "prompt")
    return json_response(
        {
            "count": len(ids),
            "max_model_len": worker.max_model_tokens,
            "tokens": ids,
            "token_strs": None,
        }
    )


async def detokenize(http: web.Request) -> web.Response:
    """POST /detokenize: return the text of token ids."""
    worker = http.app[WORKER]
    body = bodies.decode(await http.read(), bodies.DETOKENIZE)
    check_model(worker, body.model)
    if any(token >= worker.tokenizer.vocab for token in body.tokens):
        raise ApiError(400, f"token ids must be below {worker.tokenizer.vocab}", "tokens")
    return json_response({"prompt": worker.tokenizer.decode(body.tokens)})


async def kv_event_sources(http: web.Request) -> web.Response:
    """GET /kv_event_sources: return the endpoints of KV events, in the form of vLLM 0.31."""
    return json_response(http.app[WORKER].publisher.sources())


async def kv_snapshot(http: web.Request) -> web.Response:
    """GET /kv_snapshot: return the whole prefix cache after the last batch of KV events
    (engine.wire.events).
    """
    body = http.app[WORKER].snapshot()
    return web.Response(body=body, content_type="application/msgpack")


async def reset_prefix_cache(http: web.Request) -> web.Response:
    """POST /reset_prefix_cache: drop every cached block."""
    http.app[WORKER].reset_cache()
    return web.Response()
