"""The endpoints of a Kubernetes service (EndpointSlices), listed and then watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from importlib import import_module
from typing import Any, Literal

import aiohttp
import msgspec

from router.config.worker_spec import WorkerSpecError
from router.discovery.source import KubernetesSpec, Report, ReportedWorker, bounded

MAX_SLICES = 256
OLD = 410  # "Gone": the version asked for is too old, all is to be listed anew


class Conditions(msgspec.Struct):
    """None: unknown."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    """One or several addresses that mean the same."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = msgspec.field(default_factory=Conditions)


class Port(msgspec.Struct):
    """A port of all endpoints of a slice."""

    port: int | None = None
    name: str | None = None
    protocol: str | None = None


class Meta(msgspec.Struct, rename="camel"):
    """Which slice, and when."""

    name: str = ""
    resource_version: str = ""


class Slice(msgspec.Struct, rename="camel"):
    """An EndpointSlice; other fields are passed over."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Listed(msgspec.Struct):
    """The answer to a list."""

    metadata: Meta
    items: tuple[Slice, ...] | None = None


class Event(msgspec.Struct):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Status(msgspec.Struct):
    """What an ERROR carries."""

    code: int = 0
    reason: str = ""
    message: str = ""


class TooOldError(Exception):
    """The version that was asked for is gone: list anew."""


class SliceError(ValueError):
    """What came is no answer of a Kubernetes API."""


def decode_list(data: bytes) -> Listed:
    """Raises SliceError."""
    try:
        listed = msgspec.json.decode(data, type=Listed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SliceError(f"no list of EndpointSlices: {error}") from error
    if len(listed.items or ()) > MAX_SLICES:
        raise SliceError(f"{len(listed.items or ())} slices; at most {MAX_SLICES} fit")
    return listed


class Slices:
    """All slices of a service as of the latest event. Lifetime: from one list to the next."""

    def __init__(self, listed: Listed) -> None:
        self.version = listed.metadata.resource_version
        self._by_name: dict[str, Slice] = {one.metadata.name: one for one in listed.items or ()}

    def take(self, line: bytes) -> bool:
        """An event; whether a slice changed. Raises SliceError, TooOldError."""
        try:
            event = msgspec.json.decode(line, type=Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                if status.code == OLD:
                    raise TooOldError(status.message)
                raise SliceError(f"the watch ended: {status.code} {status.reason[:80]}")
            one = msgspec.json.decode(event.object, type=Slice)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise SliceError(f"no event of EndpointSlices: {error}") from error
        self.version = one.metadata.resource_version or self.version
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._by_name.pop(one.metadata.name, None)
        else:
            self._by_name[one.metadata.name] = one
        if len(self._by_name) > MAX_SLICES:
            raise SliceError(f"more than {MAX_SLICES} slices")
        return True

    def report(self, spec: KubernetesSpec) -> Report:
        """The workers in them."""
        return workers_of(self._by_name, spec)


def workers_of(slices: Mapping[str, Slice], spec: KubernetesSpec) -> Report:
    """Those that are ready, and those that stop."""
    found: dict[str, ReportedWorker] = {}
    refused: list[str] = []
    for name, one in sorted(slices.items()):
        try:
            port = _port_of(one, spec.port)
        except SliceError as error:
            if one.endpoints:
                refused.append(f"slice {name[:100]!r}: {error}")
            continue
        for endpoint in one.endpoints or ():
            stopping = endpoint.conditions.terminating is True
            if not (stopping or endpoint.conditions.ready is not False):
                continue
            if not endpoint.addresses:
                continue
            address = endpoint.addresses[0]  # the others are the same endpoint
            host = f"{spec.service}.{spec.namespace}.svc"
            try:
                worker = spec.template.at(address, port, host)
            except WorkerSpecError as error:
                refused.append(f"slice {name[:100]!r}: {address[:100]!r}: {error}")
                continue
            before = found.get(worker.url)
            if before is None or (before.stopping and not stopping):
                found[worker.url] = ReportedWorker(worker, stopping)
    return bounded(list(found.values()), refused)


def _port_of(one: Slice, name: str | None) -> int:
    """Raises SliceError."""
    if one.address_type not in ("IPv4", "IPv6"):
        raise SliceError(f"addresses of type {one.address_type[:40]!r}; known: IPv4, IPv6")
    ports = [p for p in one.ports or () if p.port is not None and p.protocol in (None, "TCP")]
    if name is not None:
        ports = [p for p in ports if p.name == name]
    if len(ports) != 1:
        names = ", ".join(repr(p.name) for p in one.ports or ())[:200] or "none"
        wanted = "one of these behind the service: SERVICE:PORTNAME" if name is None else repr(name)
        raise SliceError(f"wanted: {wanted}; its TCP ports: {names}")
    port = ports[0].port
    assert port is not None
    if not 0 < port <= 65_535:
        raise SliceError(f"port {port}")
    return port


MISSING = "kubernetes_asyncio is not installed: pip install 'warmroute[kubernetes]'"
_AGAIN_S = (0.2, 5.0)  # after a failure; doubles
_ANSWER_S = 10.0  # a list
_WATCH_S = 60  # the server ends a watch after this; it is begun anew from where it was
_SILENT_S = _WATCH_S + 15.0
_MAX_LIST_BYTES = 32 << 20
_MAX_LINE_BYTES = 4 << 20

Connect = Callable[[], Awaitable[Any]]  # an ApiClient


class KubernetesSource:
    """Lifetime: as long as it is named."""

    def __init__(self, spec: KubernetesSpec, connect: Connect | None = None) -> None:
        """`connect`: to another API server than the one that the environment names."""
        self._spec = spec
        self._connect = connect or _connect

    async def reports(self) -> AsyncIterator[Report]:
        """One after each list and each event that changes something."""
        pause_s = _AGAIN_S[0]
        while True:
            try:
                async with aclosing(self._connected()) as reports:
                    async for report in reports:
                        pause_s = _AGAIN_S[0]
                        yield report
                trouble = None
            except ImportError as error:
                if not (error.name or "").startswith("kubernetes_asyncio"):
                    raise
                trouble = MISSING
            except (SliceError, OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
                trouble = str(error) or type(error).__name__
            except Exception as error:  # the library's own kinds, which are imported lazily
                if not type(error).__module__.startswith("kubernetes_asyncio"):
                    raise
                trouble = _reason(error)
            if trouble is not None:
                yield Report(None, f"Kubernetes API: {trouble}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_S[1])

    async def _connected(self) -> AsyncGenerator[Report, None]:
        """Until the connection, the library or the server fails."""
        client = await self._connect()
        try:
            while True:
                listed = decode_list(await self._list(client))
                slices = Slices(listed)
                yield slices.report(self._spec)
                try:
                    async with aclosing(self._watched(client, slices)) as reports:
                        async for report in reports:
                            yield report
                except TooOldError:
                    continue
        finally:
            await client.close()

    async def _watched(self, client: Any, slices: Slices) -> AsyncGenerator[Report, None]:
        """Watch after watch, each from where the one before ended. Raises TooOldError."""
        while True:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self._ask(
                    client,
                    watch=True,
                    resource_version=slices.version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_S,
                    _request_timeout=_SILENT_S,
                )
            events = 0
            try:
                _check(reply.status)
                async for line in _lines(reply.content):
                    events += 1
                    if slices.take(line):
                        yield slices.report(self._spec)
            finally:
                reply.close()
            if not events:  # a server that ends each watch at once is not asked without a pause
                await asyncio.sleep(_AGAIN_S[0])

    async def _list(self, client: Any) -> bytes:
        async with asyncio.timeout(_ANSWER_S):
            reply = await self._ask(client)
            try:
                _check(reply.status)
                data = bytearray()
                async for part in reply.content.iter_any():
                    data += part
                    if len(data) > _MAX_LIST_BYTES:
                        raise SliceError(f"a list of more than {_MAX_LIST_BYTES} bytes")
            finally:
                reply.close()
        return bytes(data)

    async def _ask(self, client: Any, **options: Any) -> aiohttp.ClientResponse:
        from kubernetes_asyncio.client import DiscoveryV1Api

        reply = await DiscoveryV1Api(client).list_namespaced_endpoint_slice(
            self._spec.namespace,
            label_selector=f"kubernetes.io/service-name={self._spec.service}",
            _preload_content=False,
            **options,
        )
        assert isinstance(reply, aiohttp.ClientResponse)
        return reply


async def _connect() -> Any:
    """An ApiClient: in a cluster by its service account, else by kubeconfig."""
    # Half a second of reading modules, which must not stop the event loop.
    client = await asyncio.to_thread(import_module, "kubernetes_asyncio.client")
    config = await asyncio.to_thread(import_module, "kubernetes_asyncio.config")
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    return client.ApiClient()


def _check(status: int) -> None:
    """Raises SliceError, TooOldError."""
    if status == OLD:
        raise TooOldError("410")
    if status in (401, 403):
        raise SliceError(
            f"{status}: the account may not list and watch endpointslices of discovery.k8s.io here"
        )
    if status != 200:
        raise SliceError(f"it answers {status}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines without their ends. Raises SliceError for one too long."""
    rest = bytearray()
    async for part in content.iter_any():
        rest += part
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > _MAX_LINE_BYTES:
            raise SliceError(f"an event of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield bytes(line)


def _reason(error: Exception) -> str:
    """The library's errors have whole answers in them."""
    status = getattr(error, "status", None)
    return f"it answers {status}" if status else f"{type(error).__name__}: {str(error)[:200]}"
