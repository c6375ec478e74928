"""Endpoints for operators: health, load, the latest steps, why a request waits, pinned prefixes. A
request names a prefix by a prompt, by messages, or by the chain hash of a cached block, as KV
events have it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from engine.pins import Pin, PinRefusal, PinRefused, Pins
from engine.scheduler.explain import dominant, reasons
from engine.server.bodies import chat_of, decode, prompts_of
from engine.server.errors import ApiError
from engine.server.metrics import KEPT_STEPS
from engine.server.openai import WORKER, check_model, encoded_chat, tokens_of
from engine.server.worker import Worker
from engine.wire.tokens import Message
from kvkernels import chain_hashes, chain_seed

DEFAULT_STEPS = 100
SHOWN_REQUESTS = 200
_MAX_DIGITS = 6


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a response with `value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


async def health(http: web.Request) -> web.Response:
    """GET /health: 200 while the worker takes requests, 503 while it shuts down.

    The body says what most of the waiting requests wait for (docs/why-is-it-not-batching.md).
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
    """GET /metrics: return the metrics as Prometheus text."""
    text = http.app[WORKER].metrics.text()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=text, headers={"Content-Type": kind})


async def debug_steps(http: web.Request) -> web.Response:
    """GET /debug/steps?last=N: return the latest N steps (default 100), oldest first."""
    last = http.query.get("last", str(DEFAULT_STEPS))
    if not (last.isascii() and last.isdigit() and len(last) <= _MAX_DIGITS):
        raise ApiError(400, f"last must be a number of steps, 0..{KEPT_STEPS}", "last")
    return json_response({"steps": http.app[WORKER].steps.last(int(last))})


async def explain_request(http: web.Request) -> web.Response:
    """GET /explain/{request}: return the state of an unfinished request, and why it waits.
    `request` is the id in the request's answer, or the X-Request-Id that its client sent.
    """
    name = http.match_info["request"]
    found = http.app[WORKER].explain(name)
    if not found:
        raise ApiError(404, f"no unfinished request is called {name[:128]!r}")
    return json_response({"request": name, "sequences": found})


async def explain_all(http: web.Request) -> web.Response:
    """GET /explain: return how many requests the engine and the last step have, and what the others
    wait for, with the first requests of the queue.
    """
    worker = http.app[WORKER]
    scheduler = worker.runner.scheduler
    body = {
        **worker.steps.requests,
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "waiting_for": {key.value: count for key, count in reasons(scheduler).items()},
        "requests": worker.overview(SHOWN_REQUESTS),
    }
    return json_response(body)


async def server_info(http: web.Request) -> web.Response:
    """GET /server_info: return the worker's role, and which workers can read its KV, with the
    transport.
    """
    worker = http.app[WORKER]
    transfers = worker.transfers
    info = {
        "engine": "warmroute",
        "model": worker.model,
        "role": worker.settings.role,
        "block_size": worker.pool.block_size,
        "group": None if transfers is None else transfers.group,
        "kv_transfer": None if transfers is None else transfers.shown(),
    }
    return json_response(info)


class ReleaseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /kv/release: the names in `kv_transfer_params` of the answer, or of the request
    (`transfer_id`).
    """

    request_id: Annotated[str, Meta(pattern="^[0-9]{1,18}$")] | None = None
    generation: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    transfer_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None


_RELEASE = msgspec.json.Decoder(ReleaseBody)


async def kv_release(http: web.Request) -> web.Response:
    """POST /kv/release: free the blocks of a prompt whose KV nobody will read."""
    body = decode(await http.read(), _RELEASE)
    transfers = http.app[WORKER].transfers
    if transfers is None:
        raise ApiError(404, "this worker does not send KV to other workers (--kv-transport none)")
    if body.transfer_id is not None:
        released = http.app[WORKER].release_named(body.transfer_id)
    elif body.request_id is not None and body.generation is not None:
        released = transfers.exporter.release(int(body.request_id), body.generation)
    else:
        raise ApiError(400, "give transfer_id, or request_id and generation", "request_id")
    return json_response({"released": released})


MAX_TTL_MS = 2_592_000_000  # thirty days
MAX_HASH = 2**64 - 1


class PrefixBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /pin_prefix and /unpin_prefix: one of prompt, messages, chain_hash."""

    model: str | None = None
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: list[Message] | None = None
    chain_hash: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False  # False: the text after the prefix is unknown
    ttl_ms: Annotated[int, Meta(ge=1, le=MAX_TTL_MS)] | None = None


_BODY = msgspec.json.Decoder(PrefixBody)


def routes() -> list[web.RouteDef]:
    """Return the routes of this module."""
    return [
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/debug/steps", debug_steps),
        web.get("/explain", explain_all),
        web.get("/explain/{request}", explain_request),
        web.get("/server_info", server_info),
        web.post("/kv/release", kv_release),
        web.post("/pin_prefix", pin_prefix),
        web.post("/unpin_prefix", unpin_prefix),
        web.get("/pinned_prefixes", pinned_prefixes),
    ]


async def pin_prefix(http: web.Request) -> web.Response:
    """POST /pin_prefix: keep the full blocks of a prefix in the cache, for `ttl_ms` milliseconds if
    the body has that.
    """
    worker, body, chain = await _read_body(http)
    now_s = worker.runner.clock.now_s()
    until_s = now_s + (float("inf") if body.ttl_ms is None else body.ttl_ms / 1e3)
    try:
        pin = _pins(worker).pin(chain, until_s)
    except PinRefused as refusal:
        raise _api_error(refusal) from refusal
    return json_response(_pin_fields(pin, worker, now_s))


async def unpin_prefix(http: web.Request) -> web.Response:
    """POST /unpin_prefix: let the blocks of a pinned prefix be evicted again."""
    worker, _, chain = await _read_body(http)
    if not chain or not _pins(worker).unpin(chain[-1]):
        raise ApiError(404, "not_pinned: this prefix is not pinned, see /pinned_prefixes")
    return json_response({"chain_hash": chain[-1]})


async def pinned_prefixes(http: web.Request) -> web.Response:
    """GET /pinned_prefixes: return all pinned prefixes, and how much of the pinnable memory they
    take.
    """
    worker = http.app[WORKER]
    pins, now_s = _pins(worker), worker.runner.clock.now_s()
    shown = {
        "max_blocks": pins.max_blocks,
        "wanted_blocks": pins.wanted_blocks,
        "pinned_blocks": pins.held_blocks,
        "pinned": [_pin_fields(pin, worker, now_s) for pin in pins.all],
    }
    return json_response(shown)


def _pins(worker: Worker) -> Pins:
    """Return the current pins after ending those whose time is over, because an idle engine makes
    no steps that would end them.
    """
    scheduler = worker.runner.scheduler
    scheduler.pins.advance(worker.runner.clock.now_s())
    return scheduler.pins


def _pin_fields(pin: Pin, worker: Worker, now_s: float) -> dict[str, Any]:
    blocks = len(pin.chain)
    endless = pin.until_s == float("inf")
    return {
        "chain_hash": pin.name,
        "blocks": blocks,
        "tokens": blocks * worker.pool.block_size,
        "held_blocks": len(pin.block_ids),
        "ttl_ms": None if endless else round(1e3 * (pin.until_s - now_s)),
    }


async def _read_body(http: web.Request) -> tuple[Worker, PrefixBody, list[int]]:
    """Return the worker, the request's body, and the chain of the prefix that the body names.
    Raises ApiError for a wrong body.
    """
    worker = http.app[WORKER]
    body = decode(await http.read(), _BODY)
    check_model(worker, body.model)
    given = [body.prompt is not msgspec.UNSET, body.messages is not None]
    if sum([*given, body.chain_hash is not None]) != 1:
        raise ApiError(400, "give one of prompt, messages and chain_hash", "prompt")
    if body.chain_hash is not None:
        if not 0 <= body.chain_hash <= MAX_HASH:
            raise ApiError(400, f"chain_hash must be 0..{MAX_HASH}", "chain_hash")
        try:
            return worker, body, _pins(worker).chain_to(body.chain_hash)
        except PinRefused as refusal:
            raise _api_error(refusal) from refusal
    tokens = await _tokens(http, worker, body)
    seed = chain_seed(worker.model, None, body.cache_salt)
    return worker, body, chain_hashes(tokens.data, worker.pool.block_size, seed).tolist()


async def _tokens(
    http: web.Request, worker: Worker, body: PrefixBody
) -> np.ndarray[Any, np.dtype[np.int32]]:
    if isinstance(body.prompt, msgspec.Raw):
        prompts = prompts_of(body.prompt)
        if len(prompts) != 1:
            raise ApiError(400, f"one prefix at a time, got {len(prompts)}", "prompt")
        return await tokens_of(worker, prompts[0], body.add_special_tokens is not False)
    return await encoded_chat(http, worker, chat_of(body))


def _api_error(refusal: PinRefused) -> ApiError:
    statuses: dict[PinRefusal, int] = {"too_short": 400, "not_cached": 404}
    # 409: the request is in order, the worker's state does not allow it.
    status = statuses.get(refusal.reason, 409)
    return ApiError(status, f"{refusal.reason}: {refusal.message}")
