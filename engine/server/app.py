"""All routes of a worker, and the shape of its errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

import msgspec
from aiohttp import web

from engine.server import bodies
from engine.server.errors import ApiError
from engine.server.openai import WORKER, chat_completions, check_model, completions
from engine.server.worker import Worker
from engine.wire import PromptError
from engine.wire.tokens import Chat

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(worker: Worker) -> web.Application:
    """The application that serves `worker`."""
    app = web.Application(
        client_max_size=worker.settings.max_body_bytes, middlewares=[openai_errors]
    )
    app[WORKER] = worker
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/version", show_version),
            web.get("/metrics", metrics),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/kv_event_sources", kv_event_sources),
            web.get("/kv_snapshot", kv_snapshot),
            web.post("/reset_prefix_cache", reset_prefix_cache),
        ]
    )
    return app


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI's JSON; what is not foreseen here stays a loud 500."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except PromptError as error:
        return ApiError(400, str(error), error.param).response()
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[WORKER].settings.max_body_bytes
        return ApiError(413, f"the body exceeds {limit} bytes").response()
    except web.HTTPNotFound:
        return ApiError(404, f"no such path: {request.path[:200]}").response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{request.path[:200]} takes {allowed}").response()


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def models(http: web.Request) -> web.Response:
    """GET /v1/models: the one model."""
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
    return _json({"object": "list", "data": [card]})


async def health(http: web.Request) -> web.Response:
    """GET /health: 200 while requests are taken, 503 while shutting down."""
    return web.Response(status=503 if http.app[WORKER].draining else 200)


async def show_version(http: web.Request) -> web.Response:
    """GET /version."""
    try:
        number = version("warmroute")
    except PackageNotFoundError:  # run from a checkout that was never installed
        number = "unknown"
    return _json({"version": number, "engine": "warmroute"})


async def metrics(http: web.Request) -> web.Response:
    """GET /metrics: Prometheus text."""
    text = http.app[WORKER].exposition.text()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=text, headers={"Content-Type": kind})


async def tokenize(http: web.Request) -> web.Response:
    """POST /tokenize: a prompt, or messages through the chat template."""
    worker = http.app[WORKER]
    body = bodies.decode(await http.read(), bodies.TOKENIZE)
    check_model(worker, body.model)
    if body.messages is not None:
        chat = Chat(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens is True,
        )
        ids = await asyncio.to_thread(worker.tokenizer.encode_chat, chat, time.time())
    elif body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(worker.tokenizer.encode, body.prompt, special)
    else:
        raise ApiError(400, "give prompt or messages", "prompt")
    return _json(
        {
            "count": len(ids),
            "max_model_len": worker.max_model_tokens,
            "tokens": ids,
            "token_strs": None,
        }
    )


async def detokenize(http: web.Request) -> web.Response:
    """POST /detokenize: text of token ids."""
    worker = http.app[WORKER]
    body = bodies.decode(await http.read(), bodies.DETOKENIZE)
    check_model(worker, body.model)
    if any(token >= worker.tokenizer.vocab for token in body.tokens):
        raise ApiError(400, f"token ids must be below {worker.tokenizer.vocab}", "tokens")
    return _json({"prompt": worker.tokenizer.decode(body.tokens)})


async def kv_event_sources(http: web.Request) -> web.Response:
    """GET /kv_event_sources: where the KV events are, in the shape of vLLM 0.31."""
    return _json(http.app[WORKER].publisher.sources())


async def kv_snapshot(http: web.Request) -> web.Response:
    """GET /kv_snapshot: the whole prefix cache as of one batch (engine.wire.snapshot)."""
    body = http.app[WORKER].snapshot()
    return web.Response(body=body, content_type="application/msgpack")


async def reset_prefix_cache(http: web.Request) -> web.Response:
    """POST /reset_prefix_cache: forget every cached block."""
    http.app[WORKER].reset_cache()
    return web.Response()
