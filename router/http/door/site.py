"""Listening, with the door before the server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aiohttp import web

from router.http.answers import Answering
from router.http.door.connection import DoorConnection
from router.http.door.door import Door


class DoorSite(web.BaseSite):
    """Serves a runner's application through a door. Lifetime: process."""

    def __init__(
        self,
        runner: web.AppRunner,
        door: Door,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        backlog: int = 1024,
        sockets: Sequence[socket.socket] = (),
        hot: Mapping[str, Answering] = MappingProxyType({}),
        reuse_port: bool = False,
    ) -> None:
        """`sockets`: listens on these, already bound, instead of on `host` and `port`. `hot`: what
        the door serves itself, by path.
        """
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._door = door
        self._host, self._port = host, port
        self._shared = reuse_port
        self._sockets = sockets
        self._hot = hot
        self._servers: list[asyncio.AbstractServer] = []

    @property
    def name(self) -> str:
        """What aiohttp calls the site in its lists."""
        return f"{'http' if self._ssl_context is None else 'https'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        server, door, hot = self._runner.server, self._door, self._hot
        assert server is not None

        def connection() -> DoorConnection:
            return DoorConnection(door, server, hot)

        places: list[dict[str, Any]] = [{"sock": one} for one in self._sockets]
        options: dict[str, Any] = {"backlog": self._backlog}
        if self._ssl_context is not None:
            self._ssl_context.sslobject_class = _counted(door)
            # A handshake is the first part of what a client must get through in time.
            options |= {"ssl": self._ssl_context, "ssl_handshake_timeout": door.terms().head_s}
        loop = asyncio.get_running_loop()
        for place in places or [
            {"host": self._host, "port": self._port, "reuse_port": self._shared}
        ]:
            self._servers.append(await loop.create_server(connection, **place, **options))
        self._server = self._servers[0]  # whose address the runner shows
        door.start()

    def accept_no_more(self) -> None:
        """Listen no more; the connections that are there stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def stop(self) -> None:
        """Listen no more."""
        self._door.stop()
        self.accept_no_more()
        await super().stop()


def _counted(door: Door) -> type[ssl.SSLObject]:
    """TLS whose failed handshakes are counted: event loops tell nobody of them."""

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                door.count("bad_handshake")
                raise

    return Counted
