"""Reads the facts of a routing examination from a router's admin port and from its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.wire.events import WireError
from engine.wire.metrics import (
    CACHE_CONFIG,
    PREFIX_HITS,
    PREFIX_QUERIES,
    REQUEST_SUCCESS,
    Sample,
    samples,
)
from router.doctor.report import DoctorError
from router.doctor.routing.facts import (
    DecisionRow,
    EngineFacts,
    PolicyRow,
    WorkerRow,
)
from router.doctor.routing.tokens import ComparedTokens, FixedPrompt, compared_tokens
from router.engines.adapter import (
    MAX_METRICS_BYTES,
    MAX_REPLY_BYTES,
    fetch,
    trouble_with,
)
from router.engines.vllm import RENDERER, is_renderer
from router.events.sources import (
    RankedSources,
    ZmqSource,
    kv_event_sources,
    server_info_sources,
)

T = TypeVar("T")

_MOST_DECISIONS = 1_000
_FAILURES = (WireError, aiohttp.ClientError, TimeoutError, OSError)
EXACT, MISMATCH = "warmroute_tokenizer_exact", "warmroute_tokenizer_mismatch"
REFUSALS, EVICTED = "warmroute_template_refusals", "warmroute_index_evicted_blocks"
ATTRIBUTIONS = "warmroute_attribution_lines"
FOREIGN, KV_EVENTS = "warmroute_worker_foreign_requests", "warmroute_kv_events"
REPLIES, PEERS = "warmroute_replies", "warmroute_replicas_peers"
INFLIGHT = "warmroute_worker_requests"
_ROUTER_METRICS = (
    *(EXACT, MISMATCH, REFUSALS, EVICTED, ATTRIBUTIONS),
    *(FOREIGN, KV_EVENTS, REPLIES, PEERS, INFLIGHT),
)
_ENGINE_METRICS = (CACHE_CONFIG, PREFIX_QUERIES, PREFIX_HITS, REQUEST_SUCCESS)


class _WorkerList(msgspec.Struct):
    workers: list[WorkerRow]


class _DecisionList(msgspec.Struct):
    decisions: list[DecisionRow]


class _NamedModel(msgspec.Struct):
    id: str
    parent: str | None = None
    owned_by: str | None = None


class _NamedModels(msgspec.Struct):
    data: list[_NamedModel] = []


@dataclass(frozen=True, slots=True)
class Counts:
    """The samples of a page of metrics."""

    rows: tuple[Sample, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return sum(row.value for row in self._of(name, labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of a metric's samples by the values of one label."""
        found: dict[str, float] = {}
        for row in self._of(name, labels):
            key = row.labels.get(label, "")
            found[key] = found.get(key, 0.0) + row.value
        return found

    def has(self, name: str) -> bool:
        """Return whether there is a sample of this metric."""
        return any(row.name == name for row in self.rows)

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a metric's first sample; none if there is no sample."""
        return next((row.labels for row in self.rows if row.name == name), {})

    def _of(self, name: str, labels: Mapping[str, str]) -> Iterable[Sample]:
        wanted = labels.items()
        return (row for row in self.rows if row.name == name and wanted <= row.labels.items())


class RouterPages:
    """Reads the pages of a router's admin port. Lifetime: one examination."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, timeout_s: float, key: str | None
    ) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def workers(self) -> list[WorkerRow]:
        """Return the rows of the router's workers. This and the other methods raise DoctorError if
        the page cannot be read.
        """
        return (await self._json("/workers", _WorkerList)).workers

    async def decisions(self, most: int = _MOST_DECISIONS) -> list[DecisionRow]:
        """Return the router's latest decisions, newest first."""
        return (await self._json(f"/explain?last={most}", _DecisionList)).decisions

    async def policy(self) -> PolicyRow:
        return await self._json("/policy", PolicyRow)

    async def is_there(self) -> bool:
        """Return whether the URL has a router's page of workers, even if the page may not
        be read.
        """
        with suppress(*_FAILURES):
            reply = await fetch(self._http, f"{self.url}/workers", self._timeout)
            return reply.status != 404
        return True

    async def counts(self) -> Counts:
        """Return the router's metrics."""
        text = (await self._page("/metrics")).decode("utf-8", "replace")
        try:
            return Counts(tuple(samples(text, _ROUTER_METRICS)))
        except WireError as error:
            raise DoctorError(f"{self.url}/metrics: {error}") from error

    async def _json(self, path: str, kind: type[T]) -> T:
        body = await self._page(path)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise DoctorError(
                f"{self.url}{path} is no answer of a router's admin port: {error}"
            ) from error

    async def _page(self, path: str) -> bytes:
        url = self.url + path
        try:
            async with self._http.get(
                url, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as reply:
                status, body = reply.status, await _bounded(reply)
        except _FAILURES as error:
            said = await trouble_with(self.url, error, self._timeout.total or 0.0)
            raise DoctorError(f"--routing: {said}") from error
        if status != 200:
            why = "; give --admin-key-file FILE" if status == 401 else ""
            raise DoctorError(
                f"--routing: GET {url} answered {status}{why or '; is it the admin port?'}"
            )
        return body


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. Raises WireError if it is too long."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > 4 * MAX_REPLY_BYTES:
            raise WireError(f"more than {4 * MAX_REPLY_BYTES} bytes")
    return bytes(body)


class EnginePages:
    """Reads the pages of the engine at a worker's URL. Lifetime: one examination."""

    def __init__(self, http: aiohttp.ClientSession, url: str, kind: str, timeout_s: float) -> None:
        self.url = url
        self._http = http
        self._kind = kind
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._trouble = ""

    async def counts(self) -> Counts:
        """Return the engine's metrics, or an empty `Counts` if the metrics cannot be read."""
        body = await self._page("/metrics", MAX_METRICS_BYTES)
        try:
            return Counts(tuple(samples(body.decode("utf-8", "replace"), _ENGINE_METRICS)))
        except WireError as error:
            self._trouble = f"{self.url}/metrics: {error}"
            return Counts()

    async def facts(self, before: Counts) -> EngineFacts:
        """Return the facts that the engine reports about itself, and its counts since `before`."""
        after, cards, info, named = await asyncio.gather(
            self.counts(),
            self._page("/v1/models"),
            self._page("/server_info"),
            self._page("/kv_event_sources"),
        )
        if not after.rows and not self._trouble and await is_renderer(self._status):
            self._trouble = RENDERER
        facts = EngineFacts(
            trouble=self._trouble,
            settings={**_plain(info), **after.labels(CACHE_CONFIG)},
            endpoints=self._endpoints(named, info),
            adapters=_adapters(cards),
        )
        if after.has(PREFIX_QUERIES):
            facts = replace(
                facts,
                query_tokens=after.total(PREFIX_QUERIES),
                hit_tokens=after.total(PREFIX_HITS),
            )
        if after.has(REQUEST_SUCCESS) and before.has(REQUEST_SUCCESS):
            done = after.total(REQUEST_SUCCESS) - before.total(REQUEST_SUCCESS)
            facts = replace(facts, finished=max(done, 0.0))
        return facts

    async def about(self) -> tuple[str, str] | None:
        """Return the engine's kind and a model that it serves. Return None if the URL has no engine
        that reports on its cache.
        """
        listed, info, counts = await asyncio.gather(
            self._page("/v1/models"), self._page("/server_info"), self.counts()
        )
        models = _models(listed)
        is_sglang = "disable_radix_cache" in _plain(info)
        if not models or not (is_sglang or counts.has(PREFIX_QUERIES)):
            return None
        self._kind = "sglang" if is_sglang else models[0].owned_by or "vllm"
        return self._kind, models[0].id

    async def tokens(self, model: str, prompts: Iterable[FixedPrompt]) -> ComparedTokens:
        """Compare the token ids that the engine makes of the prompts with those of the folder's
        tokenizer. All counts are 0 if the engine has no `/tokenize`.
        """
        compared = ComparedTokens()
        for prompt in prompts:
            data = msgspec.json.encode({"model": model} | prompt.body)
            answer = await self._page("/tokenize", data=data)
            compared += compared_tokens(prompt, answer)
        return compared

    def _endpoints(self, named: bytes, info: bytes) -> Mapping[int, str] | None:
        host = urlsplit(self.url).hostname or ""
        try:
            if self._kind == "sglang":
                found = server_info_sources(info, host) if info else RankedSources({})
            else:
                found = kv_event_sources(named, host) if named else RankedSources({})
        except WireError:
            return None
        own = {
            rank: source.live
            for rank, source in found.by_rank.items()
            if isinstance(source, ZmqSource)
        }
        return own or None

    async def _status(self, path: str) -> int:
        try:
            return (await fetch(self._http, self.url + path, self._timeout)).status
        except _FAILURES:
            return 0

    async def _page(
        self, path: str, limit: int = MAX_REPLY_BYTES, data: bytes | None = None
    ) -> bytes:
        """Return the body of the answer to a GET, or to a POST of `data` if it is given. The body
        is empty if there is no usable answer.
        """
        method = "GET" if data is None else "POST"
        try:
            status, body = await fetch(
                self._http, self.url + path, self._timeout, limit, method, data
            )
        except _FAILURES as error:
            self._trouble = await trouble_with(self.url, error, self._timeout.total or 0.0)
            return b""
        return body if status == 200 else b""


def _plain(info: bytes) -> dict[str, str]:
    """Return the settings in `/server_info` that are not tables, as text."""
    try:
        told: dict[str, Any] = msgspec.json.decode(info or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return {k: str(v) for k, v in told.items() if isinstance(v, str | int | float | bool)}


def _adapters(cards: bytes) -> frozenset[str]:
    return frozenset(card.id for card in _models(cards) if card.parent is not None)


def _models(cards: bytes) -> Sequence[_NamedModel]:
    try:
        return msgspec.json.decode(cards or b"{}", type=_NamedModels).data
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ()
