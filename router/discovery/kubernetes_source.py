"""The endpoints of a Kubernetes service, listed and then watched (EndpointSlices).

`kubernetes_asyncio` (36.1) finds the API server and its credentials, in a cluster or by kubeconfig;
what comes back is read here, bounded. The account needs `list` and `watch` on `endpointslices` of
`discovery.k8s.io` in the namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from importlib import import_module
from typing import Any

import aiohttp

from router.discovery.slices import OLD, SliceError, Slices, TooOldError, decode_list
from router.discovery.source import Report
from router.discovery.spec import KubernetesSpec

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
