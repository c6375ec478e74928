"""The router's two ports and their listening sockets, with and without TLS."""

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
from router.config.terms import Standing
from router.restart.sockets import cannot_listen
from router.server.parser import RequestLimits
from router.server.server import HOT, Door, DoorSite, DoorTerms
from router.server.tls import TlsError, renew, server_tls
from router.upstream.client_reply import SERVER_OPTIONS

log = logging.getLogger(__name__)

_OTHER_FILES = 512  # logs, workers' events, what waits to be accepted


class Port:
    """One port. Lifetime: process."""

    def __init__(self, config: Callable[[], Config], files: int, *, admin: bool = False) -> None:
        """`files`: how many the process may have open. Raises TlsError."""
        self._config = config
        self._admin = admin
        self.tls: ssl.SSLContext | None = server_tls(self._tls_files())
        self._runner: web.AppRunner | None = None
        self._site: DoorSite | None = None
        first = config()
        most = connections_for(first.server.connections, files, said=admin)
        self.door = Door(
            _request_limits(first),
            Standing(lambda now: _terms(now, most), config),
            tuple(ip_network(peer) for peer in first.trusted_peers),
            time.monotonic,
        )

    async def listen(self, app: web.Application, sockets: Sequence[socket.socket] = ()) -> str:
        """Serve `app`; returns the address it got, which matters for port 0. Raises OSError.

        `sockets`: those to listen with, instead of new ones of our own.
        """
        config = self._config()
        host = config.admin_host if self._admin else config.host
        port = config.admin_port if self._admin else config.port
        self.door.guard(app)
        self._runner = runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=config.timeouts.shutdown_s,
            keepalive_timeout=config.timeouts.keep_alive_s,
            max_line_size=config.server.head_bytes,
            max_field_size=config.server.head_bytes,
            **SERVER_OPTIONS,
        )
        await runner.setup()
        hot = app.get(HOT, {}) if config.front == "auto" else {}
        self._site = site = DoorSite(
            runner,
            self.door,
            host,
            port,
            tls=self.tls,
            sockets=sockets,
            hot=hot,
            reuse_port=config.reuse_port and not self._admin,
        )
        try:
            await site.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        bound = runner.addresses[0]
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    @property
    def scheme(self) -> str:
        """What its URLs begin with."""
        return "http" if self.tls is None else "https"

    def accept_no_more(self) -> None:
        """Somebody else listens: what is connected is served, one answer more each; what is idle
        is closed.
        """
        self.door.closing = True
        if self._site is not None:
            self._site.accept_no_more()

    async def until_left(self, within_s: float) -> None:
        """Return once no connection is left, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.door.left()

    async def aclose(self) -> None:
        """Listen no more, let running requests end, cut off what is left."""
        if self._runner is not None:
            shutdown_s = self._config().timeouts.shutdown_s
            await asyncio.gather(self._runner.cleanup(), self.door.drain(shutdown_s))

    def renew(self) -> None:
        """Read the files of TLS anew. Those that cannot be used change nothing."""
        if self.tls is None:
            return
        try:
            renew(self.tls, self._tls_files())
        except TlsError as error:
            log.error("TLS files not read anew, the old ones stay: %s", error)

    def _tls_files(self) -> Tls:
        config = self._config()
        return config.admin_tls if self._admin else config.tls


def connections_for(wanted: int, files: int, *, said: bool = False) -> int:
    """How many connections the process can serve: each may take another one to a worker.

    Fewer than `wanted` are logged, unless that is `said` already, of the other port.
    """
    possible = max((files - _OTHER_FILES) // 2, 64)
    if wanted > possible and not said:
        log.info(
            "at most %d connections instead of door.connections %d: %d files may be open",
            possible,
            wanted,
            files,
        )
    return min(wanted, possible)


def _request_limits(config: Config) -> RequestLimits:
    limits = config.limits
    return RequestLimits(config.server.head_bytes, limits.header_bytes, limits.body_bytes)


def _terms(config: Config, most: int) -> DoorTerms:
    door = config.server
    return DoorTerms(
        connections=min(door.connections, most),
        connections_per_address=door.connections_per_address,
        held_bytes=door.arriving_bytes,
        head_s=door.head_s,
        body_s=door.body_s,
        client_s=config.timeouts.between_bytes_s,
        keep_alive_s=config.timeouts.keep_alive_s,
    )
