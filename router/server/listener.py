"""Runs the router's two HTTP ports: where they listen, with TLS or without, and how they close."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from router.http.tls import Tls, TlsError, renew, server_tls
from router.server.server import Application, HttpServer, ServerTerms
from router.server.settings import PortSettings
from router.server.sockets import cannot_listen

log = logging.getLogger(__name__)

_LEAST_FILES = 256
# Of the files that may be open: those that no client's connection, nor one to a worker that a
# client's request needs, is counted on to take; and those that clients never get, which the admin
# port, workers' events and logs find free.
_OTHER_FILES, _SPARE_FILES = 512, 128
_ADMIN_CONNECTIONS = 128


class PortListener(ABC):
    """One of the two HTTP ports, client or admin. Lifetime: process."""

    def __init__(self, settings: Callable[[], PortSettings]) -> None:
        """Make a port that does not listen yet. `settings` returns the present settings. Raises
        TlsError if the certificates are unusable.
        """
        self._settings = settings
        self._tls = PortTls(lambda: settings().tls)
        first = settings()
        terms = self.terms(first)
        self.server = HttpServer(first.requests, terms, first.trusted, time.monotonic)

    @abstractmethod
    def terms(self, settings: PortSettings) -> ServerTerms:
        """Return the limits for the port's connections."""

    async def listen(self, application: Application, sockets: Sequence[socket.socket] = ()) -> str:
        """Begin to serve `application`. Return the port's URL, which is needed if the port is 0.
        Raises OSError if the port is taken.

        `sockets` are sockets to listen with, instead of new ones.
        """
        place = self._settings()
        try:
            bound = await self.server.listen(
                application,
                place.host,
                place.port,
                tls=self._tls.context,
                sockets=sockets,
                reuse_port=place.shared,
            )
        except OSError as error:
            raise cannot_listen(place.host, place.port, error) from error
        return self._tls.url(bound)

    def accept_no_more(self) -> None:
        """Stop listening, because another process listens now. Each open connection gets one more
        answer; idle ones are closed.
        """
        self.server.closing = True
        self.server.accept_no_more()

    async def left(self) -> None:
        """Wait until no connection is open."""
        await self.server.left()

    async def aclose(self) -> None:
        """Stop listening, let running requests end within a time limit, and cut off the others."""
        await self.server.aclose(self._settings().shutdown_s)

    def renew(self) -> None:
        """Read the TLS files again."""
        self._tls.renew()

    def settle(self) -> None:
        """Use the limits of the present configuration from now on."""
        self.server.terms = self.terms(self._settings())


class ClientListener(PortListener):
    """The client port, to which clients send their requests. Lifetime: process."""

    def __init__(self, settings: Callable[[], PortSettings], files: int) -> None:
        """Make the client port. `files` is how many files the process may open. Raises TlsError if
        the certificates are unusable.
        """
        self._files = files - min(_SPARE_FILES, files // 4)
        self._most = connections_for(settings().connections.connections, files)
        super().__init__(settings)

    def terms(self, settings: PortSettings) -> ServerTerms:
        """Return the configured limits, with at most as many connections as the allowed number of
        open files permits.
        """
        return replace(_terms(settings, self._most), files=self._files)


class AdminListener(PortListener):
    """The admin port, for operators; on loopback by default. Lifetime: process."""

    def terms(self, settings: PortSettings) -> ServerTerms:
        """Return limits for a few connections. There is no limit for each address, because a
        proxy's connections all have one address.
        """
        return replace(_terms(settings, _ADMIN_CONNECTIONS), connections_per_address=0)


class PortTls:
    """The TLS context of one port, or None for plain HTTP. Lifetime: process."""

    def __init__(self, files: Callable[[], Tls]) -> None:
        """Read the TLS files. Raises TlsError if they are unusable."""
        self._files = files
        self.context: ssl.SSLContext | None = server_tls(files())

    def url(self, bound: tuple[str, int]) -> str:
        """Return the URL of the port at this address."""
        host, port = bound[:2]
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def renew(self) -> None:
        """Read the TLS files again. If they are unusable, the earlier ones stay in use."""
        if self.context is None:
            return
        try:
            renew(self.context, self._files())
        except TlsError as error:
            log.error("TLS files not read anew, the old ones stay: %s", error)


def enough(files: int) -> int:
    """Return `files`, the number of files that the process may open. Raises OSError that says what
    to do if they are too few.
    """
    if files < _LEAST_FILES:
        raise OSError(
            f"only {files} files may be open, and the router needs at least {_LEAST_FILES}: raise "
            "the limit (ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile of a container)"
        )
    return files


def connections_for(wanted: int, files: int) -> int:
    """Return how many connections the process can serve with `files` open files: each may need a
    second connection, to a worker.
    """
    possible = (files - min(_OTHER_FILES, files // 2)) // 2
    if wanted > possible:
        log.info(
            "serving at most %d connections, less than server.connections %d, because the process "
            "may open %d files (ulimit -n)",
            possible,
            wanted,
            files,
        )
    return min(wanted, possible)


def _terms(settings: PortSettings, most: int) -> ServerTerms:
    bounds = settings.connections
    return ServerTerms(
        connections=min(bounds.connections, most),
        connections_per_address=bounds.connections_per_address,
        held_bytes=bounds.arriving_bytes,
        head_s=bounds.head_s,
        body_s=bounds.body_s,
        client_s=settings.client_s,
        keep_alive_s=settings.keep_alive_s,
    )
