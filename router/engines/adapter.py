"""The interface of an engine adapter, and the bounded requests by which it recognizes an engine."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from engine.wire.events import WireError
from engine.wire.metrics import process_start_s
from policies.facts import Role
from router.body.legs import BootstrapAddress, Transfer
from router.engines.render_way import RenderWay
from router.engines.spec import WorkerSpec
from router.engines.triton_inputs import Roles
from router.events.sources import EventSource

MAX_REPLY_BYTES = 4 << 20  # of JSON: event sources, models (thousands of adapters)
MAX_METRICS_BYTES = 4 << 20
POST_S = 5.0  # at least: TensorRT-LLM waits about 2 s for events

_CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError)
T = TypeVar("T")


class EngineReply(NamedTuple):
    """The answer of an engine to one request."""

    status: int
    body: bytes


async def fetch(
    http: aiohttp.ClientSession,
    url: str,
    timeout: aiohttp.ClientTimeout,
    limit: int = MAX_REPLY_BYTES,
    method: str = "GET",
    data: bytes | None = None,
) -> EngineReply:
    """Send a request to an engine, and return the status and body of its answer. `data` is sent as
    JSON. Raises WireError for a body beyond `limit` bytes.
    """
    headers = None if data is None else {"Content-Type": "application/json"}
    async with http.request(
        method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
    ) as reply:
        body = bytearray()
        async for chunk in reply.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > limit:
                raise WireError(f"{method} {url}: more than {limit} bytes")
        return EngineReply(reply.status, bytes(body))


def decoded(body: bytes | str, kind: type[T], what: str) -> T:
    """Return `body`, decoded from JSON as `kind`. Raises WireError, whose text begins with `what`,
    if that fails.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what}: {error}") from error


async def trouble_with(url: str, error: Exception, timeout_s: float) -> str:
    """Return a text for people about a failed request to a server: what failed, and what may be
    wrong with the URL.
    """
    if isinstance(error, TimeoutError):
        return f"{url} does not answer in time; is it overloaded, or another protocol's port?"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"{url}: its certificate is not accepted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        place = f"{error.host}:{error.port}"
        reason = _reason(error.os_error)
        reset = isinstance(error.os_error, ConnectionResetError)
        if reset or isinstance(error, aiohttp.ClientSSLError):
            return f"{place}: the TLS handshake fails ({reason}); is it http://?"
        return f"{place}: cannot connect ({reason}); check host and port"
    if isinstance(error, aiohttp.ClientError):
        parts = urlsplit(url)
        if await speaks_http2(parts.hostname or "", parts.port or 80, timeout_s):
            return f"{url} speaks gRPC, or HTTP/2 alone; give its HTTP port (Triton's is 8000)"
        why = "it closed the connection" if isinstance(error, _CLOSED) else str(error)
        return f"{url}: {why or type(error).__name__}; is it an HTTP server? https://?"
    return str(error)[:400]


def _reason(error: OSError) -> str:
    """Return the system's text for the error, such as `Connection refused`. asyncio's own text
    repeats the address. Errors of TLS and of name resolution have no number of the system.
    """
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def speaks_http2(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a gRPC server in plain text answers at this address. The function sends the
    preface of HTTP/2, which a gRPC server answers with its settings (RFC 9113, section 3.4).
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_PREFACE + _SETTINGS)
            head = await reader.readexactly(9)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return head[3] == _SETTINGS[3]


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # a frame without any


class Interview:
    """The answers of one worker while it is recognized; each path is requested once. Lifetime: one
    recognition.
    """

    def __init__(self, http: aiohttp.ClientSession, spec: WorkerSpec, timeout_s: float) -> None:
        self.spec = spec
        self.silent: set[str] = set()  # addresses besides its own that did not answer
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._replies: dict[str, EngineReply] = {}

    @property
    def host(self) -> str:
        """The host name or address in the worker's URL."""
        return urlsplit(self.spec.url).hostname or "127.0.0.1"

    @property
    def metrics_url(self) -> str:
        """The URL of the worker's metrics: the URL that the operator set, or else `/metrics` of the
        worker.
        """
        return self.spec.metrics or f"{self.spec.url}/metrics"

    async def get(self, path: str) -> EngineReply:
        """Return the worker's answer to `GET path`. Raises WireError, aiohttp.ClientError or
        TimeoutError if there is no usable answer.
        """
        return await self.get_url(f"{self.spec.url}{path}")

    async def get_url(self, url: str) -> EngineReply:
        """Return the answer to a GET of a whole URL, as `get` does. Raises UnrecognizedError if
        nobody answers at the operator's `metrics=`.
        """
        if url not in self._replies:
            limit = MAX_METRICS_BYTES if url == self.metrics_url else MAX_REPLY_BYTES
            try:
                self._replies[url] = await fetch(self._http, url, self._timeout, limit)
            except (aiohttp.ClientError, TimeoutError) as error:
                if url != self.spec.metrics:
                    raise
                why = await trouble_with(url, error, self._timeout.total or 0.0)
                raise UnrecognizedError(f"metrics={url}: {why}") from error
        return self._replies[url]

    async def post(self, path: str) -> EngineReply:
        """Return the worker's answer to `POST path` with an empty body; it is sent only once."""
        key = f"POST {path}"
        if key not in self._replies:
            url = f"{self.spec.url}{path}"
            timeout = aiohttp.ClientTimeout(total=max(self._timeout.total or 0.0, POST_S))
            self._replies[key] = await fetch(self._http, url, timeout, MAX_METRICS_BYTES, "POST")
        return self._replies[key]

    async def speaks_http2(self, host: str, port: int) -> bool:
        """Return whether a server at this port speaks HTTP/2, as gRPC does."""
        return await speaks_http2(host, port, self._timeout.total or 0.0)

    async def metrics(self) -> str:
        """Return the worker's metrics as text; "" if it has none that the router can read."""
        try:
            status, body = await self.get_url(self.metrics_url)
        except WireError:
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    async def keys(self, path: str) -> frozenset[str]:
        """Return the keys of the JSON object that the worker returns at `path`. The result is empty
        if the answer is not a JSON object.
        """
        try:
            status, body = await self.get(path)
            return frozenset(decoded(body, dict[str, msgspec.Raw], path) if status == 200 else ())
        except WireError:
            return frozenset()


class UnrecognizedError(Exception):
    """Raised if a worker does not answer like an OpenAI-compatible engine. The text contains the
    worker's answer.
    """


@dataclass(frozen=True, slots=True)
class KvTransfers:
    """Failures of KV transfers from other workers, counted since the engine started."""

    expired: int = 0  # freed before another worker fetched it
    late: int = 0  # fetched although it was freed: the answers may be wrong
    failed: int = 0

    def __add__(self, other: KvTransfers) -> KvTransfers:
        return KvTransfers(
            self.expired + other.expired, self.late + other.late, self.failed + other.failed
        )


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one data-parallel rank, as its engine reports it."""

    running: int  # requests in the batch
    waiting: int  # requests not admitted yet
    kv_used_tokens: float = math.nan  # NaN: it does not say
    kv_usage: float = math.nan  # 0..1 of its KV cache, where it says no tokens
    grown: int = 0  # a count that only grows while the engine lives: a smaller one shows a restart
    asleep: bool = False  # it answers probes and no requests, and has an empty cache
    paused: bool = False  # the same, but for the cache: nobody knows
    emptied: int = 0  # how often it was asked to empty its cache since it began, and did
    block_size: int = 0  # tokens of a KV block, where the figures say it; 0: they do not yet
    transfers: KvTransfers = KvTransfers()
    adapters: frozenset[str] | None = None  # LoRA adapters in use; None: nothing is said of any
    started_s: float = math.nan  # when its process began, seconds since the epoch; NaN: unsaid


def total(loads: Collection[RankLoad]) -> RankLoad:
    """Return the load of several ranks, at least one, as the load of one worker. Shares of the
    cache are averaged.
    """
    if len(loads) == 1:
        return next(iter(loads))
    return RankLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_used_tokens=math.fsum(load.kv_used_tokens for load in loads),
        kv_usage=math.fsum(load.kv_usage for load in loads) / len(loads),
        grown=sum(load.grown for load in loads),
        asleep=all(load.asleep for load in loads),
        paused=all(load.paused or load.asleep for load in loads),
        emptied=sum(load.emptied for load in loads),
        block_size=max(load.block_size for load in loads),
        transfers=sum((load.transfers for load in loads), KvTransfers()),
        adapters=_union([load.adapters for load in loads if load.adapters is not None]),
        started_s=next(iter(loads)).started_s,  # they share a process, or a page
    )


def _union(sets: Collection[frozenset[str]]) -> frozenset[str] | None:
    return frozenset[str]().union(*sets) if sets else None


@dataclass(frozen=True, slots=True)
class LoadReader:
    """Describes where and how an engine's load is read. Readers that are equal as values give the
    same answer. `loads_in` returns the load of each rank on a page; the load of a rank that is
    missing there has not changed. `loads_in` raises WireError for a malformed page.
    """

    url: str
    loads_in: Callable[[str], Mapping[int, RankLoad]]

    async def read(
        self, http: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout
    ) -> Mapping[int, RankLoad]:
        """Return the load of each rank. Raises WireError, aiohttp.ClientError or TimeoutError if
        the load cannot be read.
        """
        status, body = await fetch(http, self.url, timeout, MAX_METRICS_BYTES)
        if status != 200:
            raise WireError(f"GET {self.url} answered {status}")
        text = body.decode("utf-8", "replace")
        loads, started_s = self.loads_in(text), process_start_s(text)
        if math.isnan(started_s):
            return loads
        return {rank: replace(load, started_s=started_s) for rank, load in loads.items()}


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Describes the request that finds out whether an engine is alive."""

    path: str = "/health"
    below: int = 500  # a status from here on means that it does not
    least_s: float = 0.0  # the shortest time that an answer may take


HEALTH = HealthCheck()  # of most engines


class _Paused(msgspec.Struct):
    is_paused: bool = False


def is_paused(body: bytes) -> bool:
    """Return whether an engine's answer says that it takes no requests for now."""
    try:
        return msgspec.json.decode(body, type=_Paused).is_paused
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class EngineVersion(NamedTuple):
    """The version that an engine reports. A field is empty if the engine does not report it."""

    version: str = ""
    revision: str | None = None  # that it was started as
    path: str = ""  # where it tells both


NO_VERSION = EngineVersion()


@dataclass(frozen=True, slots=True)
class Profile:
    """The properties that an engine reports about itself. A property that the engine does not
    report is None or empty.
    """

    block_size: int | None = None  # tokens
    usual_block_size: int = 16  # its default, taken where it does not say
    kv_tokens: Mapping[int, int] = field(default_factory=dict)  # whole KV cache, by rank
    ranks: tuple[int, ...] = (0,)  # those behind this URL
    sources: Mapping[int, EventSource] = field(default_factory=dict)  # of KV events, by rank
    keeps_copies: bool = False  # of equal blocks, each with events of its own
    version: str = ""
    reported_version: EngineVersion = NO_VERSION  # by itself alone, without what `version` adds
    transfers: bool = False  # it may take KV from others of its version, by `router.body.legs`
    role: Role = "both"  # that it was started for
    keeps_prefixes: bool = True  # of what it decodes for others
    # Of a worker that prefills while another one, which decodes, waits for the KV.
    bootstrap: BootstrapAddress | None = None
    snapshot: str | None = None  # URL of its whole cache
    loads: LoadReader | None = None
    health: HealthCheck = HEALTH
    advice: str = ""  # advice to its operator: options with which it would work better
    pause_url: str | None = None  # tells by JSON whether it `is_paused`; None: it cannot be
    roles: Mapping[str, Roles] = field(default_factory=dict)  # of KServe's inputs, by model
    lacks: frozenset[str] = frozenset()  # paths, besides those that its kind has never
    grpc: str | None = None  # HOST:PORT where it speaks KServe's gRPC
    caches_prefixes: bool = True  # False: its prefix caching is off
    leaves_out_groups: bool = False  # its KV events do not tell of its windows or states


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The form in which an engine answers `return_token_ids` in a streamed request. `chat` says
    whether chats support the field, too. `hidden` is the value that the fields of ids have if
    nobody asked for ids; it is empty if these fields are left out. `chat_tokens` is the most tokens
    of an answer to a chat that sets no limit; None means as many as fit into the context.
    """

    chat: bool = True
    hidden: bytes = b""
    chat_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ExactnessFlags:
    """The engine's start flags on which exact cache hits depend. A flag is None if the engine does
    not have it.
    """

    caching: str | None = None  # switches its prefix caching on
    events: str | None = None  # switches its KV events on
    replay: str | None = None  # lets it send missed events again
    buffer: str | None = None  # lets it keep more events for that


NO_FLAGS = ExactnessFlags()


@dataclass(frozen=True, slots=True)
class Adapter:
    """Describes how one engine is recognized, and what its servers can do in every version that we
    know. `recognize` returns None if another engine answers. Until it is sure which engine answers,
    it sends no request that changes the state of an engine. `named` says that the operator has
    named this engine; then the adapter uses defaults for missing answers. Raises UnrecognizedError,
    WireError, aiohttp.ClientError or TimeoutError if the engine cannot be recognized.
    """

    kind: str
    recognize: Callable[[Interview, bool], Awaitable[Profile | None]]
    lacks: frozenset[str] = frozenset()  # inference paths, of `router.body.paths`
    takes_prompt_ids: bool = False  # token ids as the `prompt` of a completion
    chat_ids: str | None = None  # the field of a chat that takes its prompt's token ids
    stream_form: StreamForm | None = None  # of token ids in its streams; None: it gives none
    transfer: Transfer | None = None  # how KV passes between two of its workers
    role_switch: str | None = None  # the path at which an engine is told another role
    speaks_kserve: bool = False
    has_repository: bool = False  # clients may load and unload its models, as Triton's
    flags: ExactnessFlags = NO_FLAGS
    render: RenderWay | None = None  # how it is asked for token ids of requests; None: it is not


Count = Annotated[int, Meta(ge=0, le=10**12)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # tokens of a block
Rank = Annotated[int, Meta(ge=0, le=4_095)]
Ranks = Annotated[int, Meta(ge=1, le=4_096)]
MAX_SHARE = 1.1  # engines overshoot a little


def share(value: float | None, name: str) -> float:
    """Return a share of the KV cache, 0..1; NaN for None. Raises WireError for any other value."""
    if value is None:
        return math.nan
    if not 0.0 <= value <= MAX_SHARE:
        raise WireError(f"{name} is {value:g}; expected 0..1")
    return min(value, 1.0)


MAX_MODELS = 1_024  # models of one worker that are served if no other limit is set


class Card(msgspec.Struct):
    """A model or a LoRA adapter in an engine's list of models."""

    id: str
    max_model_len: Count | None = None
    owned_by: str | None = None
    parent: str | None = None  # the base model of a LoRA adapter
    root: str | None = None  # the engine's own name of the model, as vLLM gets it by --model


class _CardList(msgspec.Struct):
    data: list[Card]


async def cards(talk: Interview) -> list[Card]:
    """Return the models that a worker serves, at least one. Raises UnrecognizedError if the worker
    does not list any.
    """
    where = f"GET {talk.spec.url}/v1/models"
    status, body = await talk.get("/v1/models")
    if status != 200:
        raise UnrecognizedError(f"{where} answered {status}, not a list of models")
    try:
        models = decoded(body, _CardList, f"{where} is not a list of models").data
    except WireError as error:
        if await _has_only_metrics(talk):
            why = "is a port of metrics alone; give the HTTP port (Triton's is 8000)"
            raise UnrecognizedError(f"{talk.spec.url} {why}") from error
        raise UnrecognizedError(str(error)) from error
    if not models:
        raise UnrecognizedError(f"{where} lists no model")
    return models


async def _has_only_metrics(talk: Interview) -> bool:
    """Return whether a server without a list of models has a page of Prometheus metrics."""
    with suppress(WireError, aiohttp.ClientError, TimeoutError):
        status, body = await talk.get("/metrics")
        return status == 200 and body.startswith((b"# HELP ", b"# TYPE "))
    return False
