"""The door of one port: who is let in, how long it may take, and what turned whom away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from router.http.answers import Handler, error_response
from router.http.door.connection import DoorConnection
from router.http.door.peers import Network, counted_as, trusts
from router.http.door.refusals import NO_SNIFFING, REFUSALS
from router.http.door.requests import RequestLimits
from router.http.errors import ClientError

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks for who is late


@dataclass(frozen=True, slots=True)
class DoorTerms:
    """Bounds of connections. Lifetime: process, replaced on reload."""

    connections: int  # in all
    connections_per_address: int  # 0: any number
    held_bytes: int  # of requests that are still arriving, in all
    head_s: float  # from its first byte, or the connection's beginning, to its last
    body_s: float  # the same of a body
    client_s: float  # for a client to read what waits for it
    keep_alive_s: float = 75.0  # without a request, where the door itself serves


class Door:
    """Lifetime: process."""

    def __init__(
        self,
        limits: RequestLimits,
        terms: Callable[[], DoorTerms],
        trusted: tuple[Network, ...],
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives monotonic seconds."""
        self.limits = limits
        self.terms = terms
        self.clock = clock
        self.refusals: Counter[str] = Counter()  # by reason
        self.held_bytes = 0
        self.closing = False  # each answer is the last one of its connection
        self._trusted = trusted
        self._token = secrets.token_hex(16)
        self._connections: set[DoorConnection] = set()
        self._of_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()  # no connection was open at some moment

    @property
    def connections(self) -> int:
        """Open ones, those that are being turned away included."""
        return len(self._connections)

    async def left(self) -> None:
        """Return once no connection is open."""
        while self._connections:
            self._emptied.clear()
            await self._emptied.wait()

    def start(self) -> None:
        """Begin to look for who is late."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Give up who is late."""
        now_s = self.clock()
        for connection in tuple(self._connections):
            connection.look(now_s)

    async def drain(self, within_s: float) -> None:
        """End what the door serves itself: idle connections now, requests as they end, or late
        ones after so many seconds.
        """
        tasks = [task for one in tuple(self._connections) if (task := one.leave()) is not None]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def trusts(self, host: str) -> bool:
        """Whether the peer may say what only routers say."""
        return trusts(self._trusted, host)

    def enter(self, connection: DoorConnection, host: str) -> str | None:
        """A connection was made; the reason for which it is turned away, None: it may stay."""
        terms = self.terms()
        self._connections.add(connection)
        reason = None
        if len(self._connections) > terms.connections:
            reason = "too_many_connections"
        name = counted_as(host)
        self._of_address[name] += 1
        if 0 < terms.connections_per_address < self._of_address[name]:
            reason = reason or "too_many_of_address"
        if reason is not None:
            self.count(reason)
        return reason

    def leave(self, connection: DoorConnection, host: str) -> None:
        """A connection ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()
        name = counted_as(host)
        self._of_address[name] -= 1
        if self._of_address[name] <= 0:
            del self._of_address[name]

    def hold(self, more_bytes: int) -> bool:
        """Bytes of unfinished requests came or went; False where these are too many."""
        self.held_bytes += more_bytes
        return more_bytes <= 0 or self.held_bytes <= self.terms().held_bytes

    def count(self, reason: str) -> None:
        """Something was turned away or given up; told at the 1st, 2nd, 4th, 8th ... time."""
        self.refusals[reason] += 1
        count = self.refusals[reason]
        if count & (count - 1) == 0:
            log.warning("turned away at the door: %s (%d so far)", reason, count)

    def refusal_request(self, reason: str) -> bytes:
        """The request whose answer is the refusal, for the server behind; it closes after it."""
        line = b"GET /%s/%s HTTP/1.1" % (self._token.encode(), reason.encode())
        return line + b"\r\nHost: door\r\nConnection: close\r\n\r\n"

    def guard(self, app: web.Application) -> None:
        """Let `app` answer refusals, and tell nobody what it is made of."""
        app.middlewares.append(self._middleware())
        app.on_response_prepare.append(_discreet)

    def _middleware(self) -> Any:
        prefix = f"/{self._token}/"

        @web.middleware
        async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not request.raw_path.startswith(prefix):
                if self.closing:  # what aiohttp (3.14) asks whether the client wants it closed
                    request._message = request._message._replace(should_close=True)
                return await handler(request)
            refusal = REFUSALS[request.raw_path.removeprefix(prefix)]
            message = refusal.message
            if refusal.reason == "body_too_large":
                message = f"{message}: at most {self.limits.body_bytes} bytes"
            if refusal.status < 500:
                raise ClientError(refusal.status, message, code=refusal.reason)
            return error_response(refusal.status, message, refusal.reason)

        return refusing

    def _look_again(self) -> None:
        self.start()
        self.look()


async def _discreet(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers.popall("Server", None)
    name, value = NO_SNIFFING
    response.headers[name] = value
