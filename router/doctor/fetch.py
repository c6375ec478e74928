"""Reads servers' pages, each with a size limit and a timeout. Triton's metrics have a port of their
own. The operator gives it as `URL,metrics=URL`; otherwise the server's own port, port 8002, and the
second port above the server's own are tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from engine.wire.events import WireError
from router.doctor.readings import (
    MAX_MODELS,
    ROUTER_WANTED,
    WANTED,
    ExaminedServer,
    Gauges,
    Reading,
    Stats,
    TritonModelConfig,
    parse_gauges,
    parse_json,
    parse_stats,
)
from router.doctor.report import DoctorError
from router.engines.adapter import (
    MAX_METRICS_BYTES,
    MAX_REPLY_BYTES,
    EngineReply,
    fetch,
    trouble_with,
)
from router.engines.vllm import RENDERER, is_renderer

_TRITON_METRICS_PORT = 8002
_MAX_SETTINGS = 64  # most settings of an engine that are shown
Table = Mapping[str, Any]


class _About(msgspec.Struct):
    name: str = ""
    version: str = ""


class _Row(msgspec.Struct):
    name: str
    state: str = ""


class _Card(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Card] = []


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """A server whose kind was recognized, and the URL of its metrics."""

    server: ExaminedServer
    metrics_url: str | None


class Reader:
    """Reads the pages of one server. Lifetime: one examination."""

    def __init__(self, http: aiohttp.ClientSession, spec: str, timeout_s: float) -> None:
        """Make a reader of the server that `spec` names as `URL` or `URL,metrics=URL`. Raises
        DoctorError if `spec` is malformed.
        """
        url, _, options = spec.partition(",")
        self.url = url.rstrip("/")
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._metrics = options.removeprefix("metrics=") if options else None
        if options and not options.startswith("metrics=http"):
            raise DoctorError(f"{spec!r}: after the URL only ,metrics=URL is known")
        for one in filter(None, (self.url, self._metrics)):
            check_url(one)

    async def recognize(self) -> MetricsSource:
        """Return which kind of server answers, with its configuration. Raises DoctorError if that
        cannot be read.
        """
        try:
            about = await self._fetch("/v2")
            if about.status == 200 and about.body:  # a page of metrics has none
                return await self._v2(parse_json(about.body, _About, f"{self.url}/v2"))
            return await self._plain()
        except (WireError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise DoctorError(await self.trouble(error)) from error

    async def read(self, source: MetricsSource, now_s: float) -> Reading:
        """Return the server's current figures. Raises DoctorError if they cannot be read."""
        try:
            gauges, stats = await asyncio.gather(self._gauges(source), self._stats(source))
        except (WireError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise DoctorError(await self.trouble(error)) from error
        return Reading(now_s, gauges, stats)

    async def trouble(self, error: Exception) -> str:
        """Return a message about an error that includes the server's URL."""
        said = await trouble_with(self.url, error, self._timeout.total or 0.0)
        return f"{self.url}: {said}" if isinstance(error, WireError) else said

    async def _v2(self, about: _About) -> MetricsSource:
        found = await self._fetch("/v2/repository/index", "POST")
        rows: list[_Row] = []
        if found.status == 200:
            rows = parse_json(found.body, list[_Row], f"{self.url}/v2/repository/index")
        models = [row.name for row in rows if row.state in ("READY", "")][:MAX_MODELS]
        configs, refused = await self._configs(models)
        kind = "warmroute" if about.name == "warmroute" else "triton"
        if kind == "triton" and not models:
            raise DoctorError(
                f"{self.url} is a Triton without a ready model; load one, or ask the server that "
                "has them"
            )
        if kind == "triton" and not configs:
            raise DoctorError(f"{self.url} tells no model's configuration: {refused[0]}")
        unread = refused if kind == "triton" else ()
        server = ExaminedServer(
            self.url, kind, about.version, configs, models=tuple(models), unread=unread
        )
        metrics_url = await self._found_metrics("nv_" if kind == "triton" else "vllm:")
        if metrics_url is None and kind == "warmroute":
            raise DoctorError(
                f"{self.url} has no engine's metrics: is it the router? Give its workers' URLs, "
                "and its admin port as --router URL"
            )
        if metrics_url is None:
            said = f"no metrics at {self.url}: give {self.url},metrics=http://HOST:8002/metrics"
            server = replace(server, unread=(*unread, said))
        return MetricsSource(server, metrics_url)

    async def _configs(
        self, models: list[str]
    ) -> tuple[dict[str, TritonModelConfig], tuple[str, ...]]:
        """Return the models' configurations, and a message for each that cannot be read."""
        configs, refused = {}, []
        for model in models:
            url = f"{self.url}/v2/models/{quote(model, safe='')}/config"
            reply = await self._fetch_url(url, MAX_REPLY_BYTES)
            if reply.status == 200:
                configs[model] = parse_json(reply.body, TritonModelConfig, url)
            else:
                refused.append(f"model {model}, which is ready: GET {url} answered {reply.status}")
        return configs, tuple(refused)

    async def _plain(self) -> MetricsSource:
        """Recognize vLLM or SGLang by the server's metrics, and return the server."""
        metrics_url = self._metrics or f"{self.url}/metrics"
        reply = await self._fetch_url(metrics_url, MAX_METRICS_BYTES)
        text = reply.body.decode("utf-8", "replace") if reply.status == 200 else ""
        kind = next((k for k in ("vllm", "sglang") if f"\n{k}:" in f"\n{text}"), None)
        if kind is None and await is_renderer(self._status):
            raise DoctorError(f"{self.url}: {RENDERER}")
        if kind is None:
            raise DoctorError(
                f"{self.url} is neither Triton nor vLLM, SGLang or warmroute-engine: GET /v2 is "
                f"not there or empty, and GET {metrics_url} answered {reply.status} without their "
                "metrics; give the server's own URL"
            )
        cards = await self._fetch("/v1/models")
        listed = (
            parse_json(cards.body, _ModelList, "/v1/models")
            if cards.status == 200
            else _ModelList()
        )
        settings: dict[str, str] = {}
        for path in ("/server_info", "/get_server_info") if kind == "sglang" else ():
            told = await self._fetch(path)
            if told.status == 200:
                settings = _flat(parse_json(told.body, dict[str, Any], self.url + path))
                break
        models = tuple(card.id for card in listed.data[:MAX_MODELS])
        return MetricsSource(ExaminedServer(self.url, kind, "", {}, settings, models), metrics_url)

    async def _found_metrics(self, prefix: str) -> str | None:
        """Return the URL of the page that has metrics with this prefix, or None if none
        is found.
        """
        if self._metrics is not None:
            return self._metrics
        parts = urlsplit(self.url)
        ports = dict.fromkeys((parts.port, _TRITON_METRICS_PORT, (parts.port or 8000) + 2))
        for port in ports:
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            url = f"{parts.scheme}://{host}:{port}/metrics" if port else f"{self.url}/metrics"
            try:
                reply = await self._fetch_url(url, MAX_METRICS_BYTES)
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
            if reply.status == 200 and f"\n{prefix}".encode() in b"\n" + reply.body:
                return url
        return None

    async def _gauges(self, source: MetricsSource) -> Gauges:
        if source.metrics_url is None:
            return Gauges()
        return await self.gauges(source.metrics_url, WANTED)

    async def gauges(self, url: str, wanted: frozenset[str]) -> Gauges:
        """Return the wanted samples of a page. Raises WireError, aiohttp.ClientError or
        TimeoutError if the page cannot be read.
        """
        reply = await self._fetch_url(url, MAX_METRICS_BYTES)
        if reply.status != 200:
            raise WireError(f"GET {url} answered {reply.status}")
        return parse_gauges(reply.body.decode("utf-8", "replace"), wanted)

    async def _stats(self, source: MetricsSource) -> Mapping[str, Stats]:
        if source.server.kind != "triton":
            return {}
        reply = await self._fetch("/v2/models/stats")
        if reply.status != 200:
            raise WireError(f"GET {self.url}/v2/models/stats answered {reply.status}")
        return parse_stats(reply.body, "/v2/models/stats")

    async def _status(self, path: str) -> int:
        return (await self._fetch(path)).status

    async def _fetch(self, path: str, method: str = "GET") -> EngineReply:
        data = b"{}" if method == "POST" else None
        return await fetch(
            self._http, self.url + path, self._timeout, MAX_REPLY_BYTES, method, data
        )

    async def _fetch_url(self, url: str, limit: int) -> EngineReply:
        return await fetch(self._http, url, self._timeout, limit)


async def read_router(http: aiohttp.ClientSession, url: str, timeout_s: float) -> Gauges:
    """Return the router's counts from its admin port. Raises DoctorError if they cannot be read."""
    reader = Reader(http, url, timeout_s)
    try:
        found = await reader.gauges(f"{reader.url}/metrics", ROUTER_WANTED)
    except (WireError, aiohttp.ClientError, TimeoutError, OSError) as error:
        raise DoctorError(f"--router: {await reader.trouble(error)}") from error
    if not found.by_name:
        raise DoctorError(f"--router {url}: no warmroute metrics there; give its admin port")
    return found


def check_url(url: str) -> None:
    """Raise DoctorError if this is not the URL of a server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise DoctorError(f"{url!r} is no URL; give one such as http://127.0.0.1:8000")


def _flat(told: Table) -> dict[str, str]:
    """Return the first settings in a table that are not tables themselves, as text."""
    plain = {k: str(v) for k, v in told.items() if isinstance(v, str | int | float | bool)}
    return dict(list(plain.items())[: 8 * _MAX_SETTINGS])
