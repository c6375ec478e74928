"""Who is behind a worker's URL: engine kind, models, block size, capacity, event endpoints.

Everything is asked of the worker itself; what the operator wrote in its options wins.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.wire import EngineLoad, WireError, parse_load
from policies.facts import WorkerFacts
from router.events.source import EventSource, ZmqSource
from router.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20  # of JSON: models, event sources
MAX_METRICS_BYTES = 4 << 20
MAX_MODELS = 1_024
BLOCK_SIZES = range(1, 4_097)  # tokens, as in a worker's options
DEFAULT_BLOCK_SIZE = 16  # vLLM's, where a worker does not say
_SHOWN_MODELS, _SHOWN_CHARACTERS = 5, 100  # in a line of the log
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_ENDPOINT = re.compile(r"tcp://[^\s/:]+:\d{1,5}|tcp://\[[0-9a-fA-F:.%]+\]:\d{1,5}|ipc://\S{1,100}")


class UnrecognizedError(Exception):
    """The worker did not answer as an OpenAI-compatible engine; the text says what it did."""


@dataclass(frozen=True, slots=True)
class Recognized:
    """A worker, known."""

    kind: str  # "warmroute", "vllm" or "openai"
    facts: WorkerFacts
    source: EventSource | None  # where its events are; None: it has none
    reports_load: bool

    def __str__(self) -> str:
        """One line for people."""
        facts = self.facts
        shown = [repr(name)[1:-1][:_SHOWN_CHARACTERS] for name in facts.models[:_SHOWN_MODELS]]
        if more := len(facts.models) - len(shown):
            shown.append(f"{more} more")
        capacity = facts.kv_capacity_tokens
        tokens = "unknown" if math.isnan(capacity) else f"{capacity:.0f}"
        return (
            f"kind {self.kind}, models {' '.join(shown)}, block size {facts.block_size}, "
            f"KV tokens {tokens}, events {'yes' if facts.has_events else 'no'}"
        )


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: str | None = None
    parent: str | None = None  # the base model of a LoRA adapter


class _Models(msgspec.Struct):
    data: list[_Model]


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


async def recognize(http: aiohttp.ClientSession, spec: WorkerSpec, timeout_s: float) -> Recognized:
    """Ask the worker who it is.

    Raises UnrecognizedError, WireError, aiohttp.ClientError or TimeoutError.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    models = await _models(http, spec.url, timeout)
    load = await _load(http, spec.url, timeout)
    kind = spec.kind or _kind(models, load)
    source = await _source(http, spec, kind, timeout)
    size = spec.block_size or (load and load.block_size) or DEFAULT_BLOCK_SIZE
    if size not in BLOCK_SIZES:
        raise UnrecognizedError(f"it says that its blocks have {size} tokens; allowed: 1..4096")
    capacity = load.kv_capacity_tokens if load else None
    limits = [m.max_model_len for m in models if m.max_model_len]
    facts = WorkerFacts(
        name=spec.url,
        models=(spec.model,) if spec.model else tuple(m.id for m in models),
        block_size=size,
        role=spec.role,
        kv_capacity_tokens=_or_nan(capacity),
        max_model_tokens=min(limits) if limits else None,
        has_events=source is not None,
        adapters=frozenset(m.id for m in models if m.parent is not None),
    )
    return with_thresholds(Recognized(kind, facts, source, load is not None), spec)


def with_thresholds(recognized: Recognized, spec: WorkerSpec) -> Recognized:
    """The same worker with the thresholds and the weight that `spec` has now."""
    facts = replace(
        recognized.facts,
        max_requests=_or_nan(spec.max_requests),
        max_queued_tokens=_or_nan(spec.max_queued_tokens),
        max_kv_fraction=_or_nan(spec.max_kv_fraction),
        weight=spec.weight,
    )
    return replace(recognized, facts=facts)


async def scrape(
    http: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout
) -> EngineLoad:
    """The worker's load figures. Raises WireError, aiohttp.ClientError or TimeoutError."""
    status, body = await _get(http, f"{url}/metrics", timeout, MAX_METRICS_BYTES)
    if status != 200:
        raise WireError(f"GET {url}/metrics answered {status}")
    return parse_load(body.decode("utf-8", "replace"))


async def _models(
    http: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout
) -> list[_Model]:
    status, body = await _get(http, f"{url}/v1/models", timeout)
    if status != 200:
        raise UnrecognizedError(f"GET {url}/v1/models answered {status}, not a list of models")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnrecognizedError(f"GET {url}/v1/models is not a list of models: {error}") from error
    if not models:
        raise UnrecognizedError(f"GET {url}/v1/models lists no model")
    if len(models) > MAX_MODELS:
        raise UnrecognizedError(f"GET {url}/v1/models lists more than {MAX_MODELS} models")
    return models


async def _load(
    http: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout
) -> EngineLoad | None:
    try:
        return await scrape(http, url, timeout)
    except WireError:  # an engine without vLLM's metrics: it is served without load reports
        return None


def _kind(models: list[_Model], load: EngineLoad | None) -> str:
    if models[0].owned_by == "warmroute":
        return "warmroute"
    return "openai" if load is None else "vllm"


async def _source(
    http: aiohttp.ClientSession, spec: WorkerSpec, kind: str, timeout: aiohttp.ClientTimeout
) -> EventSource | None:
    """The worker's event endpoints: as its options say, else as `/kv_event_sources` tells."""
    snapshot = f"{spec.url}/kv_snapshot" if kind == "warmroute" else None
    if spec.events == "none":
        return None
    if spec.events is not None:
        for name, endpoint in (("events", spec.events), ("replay", spec.replay)):
            if endpoint is not None and not usable(endpoint):
                raise UnrecognizedError(f"{name} is {endpoint!r}; allowed: tcp://host:port, ipc://")
        return ZmqSource(spec.events, spec.replay, snapshot)
    status, body = await _get(http, f"{spec.url}/kv_event_sources", timeout)
    if status != 200:
        return None
    try:
        ranks = msgspec.json.decode(body, type=dict[str, _Source])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnrecognizedError(f"GET {spec.url}/kv_event_sources: {error}") from error
    rank = ranks.get("0")
    if rank is None:
        return None
    host = urlsplit(spec.url).hostname or "127.0.0.1"
    live = _reachable(rank.endpoint, host)
    given = rank.replay_endpoint
    replay = spec.replay or (_reachable(given, host) if given else None)
    for endpoint in (live, replay):
        if endpoint is not None and not usable(endpoint):
            # It can serve all the same; its cache is then guessed from our own dispatches.
            log.warning("%s: unusable event endpoint %.200r; no events", spec.url, endpoint)
            return None
    return ZmqSource(live, replay, snapshot, rank.topic)


def usable(endpoint: str) -> bool:
    """Whether ZMQ can connect to it: tcp with a host and a port, or ipc."""
    if _ENDPOINT.fullmatch(endpoint) is None:
        return False
    port = endpoint.rpartition(":")[2]
    return endpoint.startswith("ipc://") or 0 < int(port) < 65_536


def _reachable(endpoint: str, host: str) -> str:
    """An endpoint that was bound to every address, as seen from here."""
    scheme, _, address = endpoint.partition("://")
    bound, colon, port = address.rpartition(":")
    if scheme == "tcp" and colon and bound in _WILDCARDS:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{port}"
    return endpoint


async def _get(
    http: aiohttp.ClientSession,
    url: str,
    timeout: aiohttp.ClientTimeout,
    limit: int = MAX_REPLY_BYTES,
) -> tuple[int, bytes]:
    """Status and body. Raises WireError for one beyond `limit` bytes."""
    async with http.get(url, timeout=timeout, allow_redirects=False) as reply:
        body = bytearray()
        async for chunk in reply.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > limit:
                raise WireError(f"GET {url}: more than {limit} bytes")
        return reply.status, bytes(body)


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)
