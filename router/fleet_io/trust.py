"""How https workers are believed: by the pool's authorities, or as each one's options say."""

from __future__ import annotations

import ssl
from functools import cached_property
from urllib.parse import urlsplit

import aiohttp

from router.config.door import WorkerTls
from router.tls import worker_tls
from router.worker_spec import WorkerSpec


class WorkerTrust:
    """TLS towards workers, for the relay and for all that is asked of them. Lifetime: process."""

    def __init__(self, files: WorkerTls | None = None) -> None:
        """Raises `router.tls.TlsError`."""
        self._files = files or WorkerTls()
        self._options: dict[tuple[str, int], tuple[ssl.SSLContext, str | None]] = {}
        if files is not None:
            self.verifying  # noqa: B018 - read at once: a bad file must not wait for a worker

    @cached_property
    def verifying(self) -> ssl.SSLContext:
        """Believes certificates of the pool's authorities, for the host that was asked."""
        return worker_tls(self._files)

    @cached_property
    def _believing(self) -> ssl.SSLContext:
        return worker_tls(self._files, insecure=True)

    def of(self, spec: WorkerSpec) -> tuple[ssl.SSLContext | None, str | None]:
        """TLS of connections to a worker, None for plain http; the name its certificate has."""
        parts = urlsplit(spec.url)
        if parts.scheme != "https":
            return None, None
        options = self._believing if spec.insecure else self.verifying, spec.server_name
        self._options[parts.hostname or "", parts.port or 443] = options
        return options

    def session(self) -> aiohttp.ClientSession:
        """What workers are asked with beside the relay."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=self.verifying)
        return aiohttp.ClientSession(connector=connector, middlewares=(self._apply,))

    async def _apply(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Give a request the TLS options of its worker; of aiohttp 3.14, pinned by a test."""
        options = self._options.get((request.url.host or "", request.url.port or 443))
        if options is not None and request.is_ssl():
            request._ssl, request.server_hostname = options
        return await handler(request)
