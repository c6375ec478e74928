"""The router's two ports: where they listen, with and without TLS, and how they close."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_network

from aiohttp import web

from router.config.schema import Config, Tls
from router.restart.sockets import cannot_listen
from router.server.messages import NO_SNIFFING
from router.server.parser import RequestLimits
from router.server.server import Application, HttpServer, ServerTerms
from router.server.tls import TlsError, renew, server_tls

log = logging.getLogger(__name__)

_OTHER_FILES = 512  # logs, workers' events, what waits to be accepted


class ClientListener:
    """The client port. Lifetime: process."""

    def __init__(self, config: Callable[[], Config], files: int) -> None:
        """`files`: how many the process may have open. Raises TlsError."""
        self._config = config
        self._tls = PortTls(lambda: config().tls)
        first = config()
        self._most = connections_for(first.server.connections, files)
        self.server = HttpServer(
            _request_limits(first),
            _terms(first, self._most),
            tuple(ip_network(peer) for peer in first.trusted_peers),
            time.monotonic,
        )

    async def listen(self, application: Application, sockets: Sequence[socket.socket] = ()) -> str:
        """Serve `application`; returns its URL, which matters for port 0. Raises OSError.

        `sockets`: those to listen with, instead of new ones of our own.
        """
        config = self._config()
        host, port = config.host, config.port
        try:
            bound = await self.server.listen(
                application,
                host,
                port,
                tls=self._tls.context,
                sockets=sockets,
                reuse_port=config.reuse_port,
            )
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        return self._tls.url(bound)

    def accept_no_more(self) -> None:
        """Somebody else listens: what is connected is served, one answer more each; what is idle
        is closed.
        """
        self.server.closing = True
        self.server.accept_no_more()

    async def until_left(self, within_s: float) -> None:
        """Return once no connection is left, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.server.left()

    async def aclose(self) -> None:
        """Listen no more, let running requests end, cut off what is left."""
        await self.server.aclose(self._config().timeouts.shutdown_s)

    def renew(self) -> None:
        """Read the files of TLS anew."""
        self._tls.renew()

    def settle(self) -> None:
        """Take over the limits of the configuration in force."""
        self.server.terms = _terms(self._config(), self._most)


class AdminListener:
    """The admin port, served by aiohttp: for operators, loopback by default. Lifetime: process."""

    def __init__(self, config: Callable[[], Config]) -> None:
        """Raises TlsError."""
        self._config = config
        self._tls = PortTls(lambda: config().admin_tls)
        self._runner: web.AppRunner | None = None
        self._closing = False  # each answer is the last one of its connection

    async def listen(self, app: web.Application, sockets: Sequence[socket.socket] = ()) -> str:
        """As `ClientListener.listen`."""
        config = self._config()
        host, port = config.admin_host, config.admin_port
        app.on_response_prepare.append(self._headers)
        self._runner = runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=config.timeouts.shutdown_s,
            keepalive_timeout=config.timeouts.keep_alive_s,
            max_line_size=config.server.head_bytes,
            max_field_size=config.limits.header_bytes,
        )
        await runner.setup()
        tls = self._tls.context
        sites: list[web.BaseSite] = [web.SockSite(runner, one, ssl_context=tls) for one in sockets]
        try:
            for site in sites or [web.TCPSite(runner, host, port, ssl_context=tls)]:
                await site.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        return self._tls.url(runner.addresses[0])

    async def accept_no_more(self) -> None:
        """As of `ClientListener`."""
        self._closing = True
        if self._runner is not None and self._runner.server is not None:
            for site in tuple(self._runner.sites):
                await site.stop()
            self._runner.server.pre_shutdown()  # closes what is idle

    async def aclose(self) -> None:
        """As of `ClientListener`."""
        if self._runner is not None:
            await self._runner.cleanup()

    def renew(self) -> None:
        """Read the files of TLS anew."""
        self._tls.renew()

    async def _headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Tell nobody what the port is made of."""
        response.headers.popall("Server", None)
        name, value = NO_SNIFFING
        response.headers[name] = value
        if self._closing:
            response.force_close()


class PortTls:
    """One port's TLS, or none. Lifetime: process."""

    def __init__(self, files: Callable[[], Tls]) -> None:
        """Raises TlsError."""
        self._files = files
        self.context: ssl.SSLContext | None = server_tls(files())

    def url(self, bound: tuple[str, int]) -> str:
        """Of the port at this address."""
        host, port = bound[:2]
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def renew(self) -> None:
        """Read the files anew. Those that cannot be used change nothing."""
        if self.context is None:
            return
        try:
            renew(self.context, self._files())
        except TlsError as error:
            log.error("TLS files not read anew, the old ones stay: %s", error)


def connections_for(wanted: int, files: int) -> int:
    """How many connections the process can serve: each may take another one to a worker."""
    possible = max((files - _OTHER_FILES) // 2, 64)
    if wanted > possible:
        log.info(
            "at most %d connections instead of server.connections %d: %d files may be open",
            possible,
            wanted,
            files,
        )
    return min(wanted, possible)


def _request_limits(config: Config) -> RequestLimits:
    limits = config.limits
    return RequestLimits(config.server.head_bytes, limits.header_bytes, limits.body_bytes)


def _terms(config: Config, most: int) -> ServerTerms:
    server = config.server
    return ServerTerms(
        connections=min(server.connections, most),
        connections_per_address=server.connections_per_address,
        held_bytes=server.arriving_bytes,
        head_s=server.head_s,
        body_s=server.body_s,
        client_s=config.timeouts.between_bytes_s,
        keep_alive_s=config.timeouts.keep_alive_s,
    )
