"""Asking a worker: every answer bounded in time and bytes, and asked for once an interview."""

from __future__ import annotations

from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.wire import WireError
from router.worker_spec import WorkerSpec

MAX_REPLY_BYTES = 1 << 20  # of JSON: models, event sources
MAX_METRICS_BYTES = 4 << 20
POST_S = 5.0  # at the least: TensorRT-LLM waits about 2 s for events to come

T = TypeVar("T")


class Reply(NamedTuple):
    """What was answered."""

    status: int
    body: bytes


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    timeout: aiohttp.ClientTimeout,
    limit: int = MAX_REPLY_BYTES,
    method: str = "GET",
    data: bytes | None = None,
) -> Reply:
    """Status and body; `data` is JSON to send. Raises WireError for one beyond `limit` bytes."""
    headers = None if data is None else {"Content-Type": "application/json"}
    async with http.request(
        method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
    ) as reply:
        body = bytearray()
        async for chunk in reply.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > limit:
                raise WireError(f"{method} {url}: more than {limit} bytes")
        return Reply(reply.status, bytes(body))


async def ask_text(http: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout) -> str:
    """A page of metrics. Raises WireError where its status is not 200, too."""
    status, body = await ask(http, url, timeout, MAX_METRICS_BYTES)
    if status != 200:
        raise WireError(f"GET {url} answered {status}")
    return body.decode("utf-8", "replace")


async def ask_json(
    http: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout, kind: type[T]
) -> T:
    """A JSON answer of type `kind`. Raises WireError where its status is not 200, too."""
    status, body = await ask(http, url, timeout, MAX_METRICS_BYTES)
    if status != 200:
        raise WireError(f"GET {url} answered {status}")
    return decoded(body, kind, url)


def decoded(body: bytes, kind: type[T], what: str) -> T:
    """`body` as JSON of type `kind`. Raises WireError that begins with `what`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what}: {error}") from error


class Interview:
    """One worker's answers while it is being recognized; each path is asked for once.

    Lifetime: one recognition.
    """

    def __init__(self, http: aiohttp.ClientSession, spec: WorkerSpec, timeout_s: float) -> None:
        self.spec = spec
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._replies: dict[str, Reply] = {}

    @property
    def host(self) -> str:
        """The worker's, as in its URL."""
        return urlsplit(self.spec.url).hostname or "127.0.0.1"

    @property
    def metrics_url(self) -> str:
        """Where its load figures are: as the operator says, else `/metrics`."""
        return self.spec.metrics or f"{self.spec.url}/metrics"

    async def get(self, path: str) -> Reply:
        """What it answers to `GET path`. Raises WireError, aiohttp.ClientError, TimeoutError."""
        return await self.get_url(f"{self.spec.url}{path}")

    async def get_url(self, url: str) -> Reply:
        """As `get`, for a whole URL."""
        if url not in self._replies:
            limit = MAX_METRICS_BYTES if url == self.metrics_url else MAX_REPLY_BYTES
            self._replies[url] = await ask(self._http, url, self._timeout, limit)
        return self._replies[url]

    async def post(self, path: str) -> Reply:
        """What it answers to `POST path` with an empty body. Never asked for twice either."""
        key = f"POST {path}"
        if key not in self._replies:
            url = f"{self.spec.url}{path}"
            timeout = aiohttp.ClientTimeout(total=max(self._timeout.total or 0.0, POST_S))
            self._replies[key] = await ask(self._http, url, timeout, MAX_METRICS_BYTES, "POST")
        return self._replies[key]

    async def metrics(self) -> str:
        """Its metrics as text; empty where it has none that we would read."""
        try:
            status, body = await self.get_url(self.metrics_url)
        except WireError:
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    async def keys(self, path: str) -> frozenset[str]:
        """The keys of the JSON object on `path`; none where it is something else."""
        try:
            status, body = await self.get(path)
            return frozenset(decoded(body, dict[str, msgspec.Raw], path) if status == 200 else ())
        except WireError:
            return frozenset()
