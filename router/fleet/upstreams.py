"""Opens the connections to one worker, and decides which certificates they trust."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import cached_property
from urllib.parse import urlsplit

import aiohttp

from router.engines.spec import WorkerSpec
from router.http.reply import RelayLimits, Sends
from router.http.tls import WorkerTls, worker_tls
from router.upstream.fallback import Upstream
from router.upstream.native import NativeRelay, NativeUpstream


class WorkerTrust:
    """The certificates that are trusted in connections to workers, by the relay and by all other
    requests. Lifetime: process.
    """

    def __init__(self, files: WorkerTls | None = None) -> None:
        """Read the configured certificate files. Raises `router.http.tls.TlsError` if one cannot be
        used.
        """
        self._files = files or WorkerTls()
        self._options: dict[tuple[str, int], tuple[ssl.SSLContext, str | None]] = {}
        if files is not None:
            self.verifying  # noqa: B018 - read at once: a bad file must not wait for a worker

    @cached_property
    def verifying(self) -> ssl.SSLContext:
        """The TLS context that accepts a certificate of the configured authorities if it names the
        requested host.
        """
        return worker_tls(self._files)

    @cached_property
    def _insecure_context(self) -> ssl.SSLContext:
        return worker_tls(self._files, insecure=True)

    def of(self, spec: WorkerSpec) -> tuple[ssl.SSLContext | None, str | None]:
        """Return the TLS context for connections to a worker (None for plain http), and the host
        name to expect in its certificate.
        """
        parts = urlsplit(spec.url)
        if parts.scheme != "https":
            return None, None
        options = self._insecure_context if spec.insecure else self.verifying, spec.server_name
        self._options[parts.hostname or "", parts.port or 443] = options
        return options

    def session(self) -> aiohttp.ClientSession:
        """Return an HTTP session for all requests to workers that do not use the relay."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=self.verifying)
        return aiohttp.ClientSession(connector=connector, middlewares=(self._apply,))

    async def _apply(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Set the worker's TLS options on an aiohttp request. This uses internals of aiohttp 3.14,
        which a test pins.
        """
        options = self._options.get((request.url.host or "", request.url.port or 443))
        if options is not None and request.is_ssl():
            request._ssl, request.server_hostname = options
        return await handler(request)


GrpcOpener = Callable[[str, WorkerSpec], Sends]  # of gRPC to a worker's address


def upstream_at(
    spec: WorkerSpec,
    clock: Callable[[], float],
    trust: WorkerTrust,
    relay: NativeRelay | None,
    limits: RelayLimits,
) -> Upstream:
    """Return the connections to the worker of `spec`, served by the thread of `relay` if it can
    serve them.
    """
    parts = urlsplit(spec.url)
    host, base_path = parts.hostname or "", parts.path.rstrip("/")
    tls, server_name = trust.of(spec)
    if relay is not None and tls is None:
        port = parts.port or 80
        return NativeUpstream(relay, host, port, clock, base_path=base_path, limits=limits)
    return Upstream(
        host,
        parts.port or (443 if tls else 80),
        clock,
        base_path=base_path,
        tls=tls,
        server_name=server_name,
        limits=limits,
    )
