"""A client's connection: bytes pass the door before the HTTP server reads them.

Whole requests of one possible reading go on: to the lane as long as they are hot, from the first
other one on to the server's own protocol, which gets what asyncio would tell it. A refusal is
answered by the server too, after what is still being answered: it gets a request that names the
reason, under a path that no client can know.
"""

from __future__ import annotations

import asyncio
import math
import sys
import termios
from collections.abc import Callable, Mapping
from fcntl import ioctl
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from aiohttp.tcp_helpers import tcp_keepalive

from router.http.door.head import Head
from router.http.door.lane import Lane
from router.http.door.refusals import REFUSALS
from router.http.door.requests import RequestReader, Whole
from router.http.errors import error_body, error_type

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

    from router.http.answers import Answering
    from router.http.door.door import Door

CLOSING_S = 30.0  # for a client to take the rest of the last answer
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class DoorConnection(asyncio.Protocol):
    """Lifetime: one client's TCP (or TLS) connection."""

    __slots__ = (
        *("_door", "_server_of", "_hot", "_lane", "_server", "_reader", "host", "transport"),
        *("_held_bytes", "_part", "_overdue", "_read_by_s", "_write_by_s", "_idle_until_s"),
        "_quiet_after",
    )

    def __init__(
        self,
        door: Door,
        server: Callable[[], RequestHandler],
        hot: Mapping[str, Answering] = MappingProxyType({}),
    ) -> None:
        """`server` makes the protocol behind; `hot`: what the door serves itself, by path."""
        self._door = door
        self._server_of = server
        self._hot = hot
        # One of these serves the connection while it is open.
        self._lane: Lane | None = None
        self._server: RequestHandler | None = None
        self._reader: RequestReader
        self.host = ""  # the peer's address
        self.transport: asyncio.Transport
        self._held_bytes = 0  # of an unfinished request, as the door counts them
        self._part = (0, False)  # requests before the one that has begun; whether in its body
        self._overdue = False  # found late once: what had come by then is read before it counts
        self._read_by_s = math.inf  # when what has begun must be whole
        self._write_by_s = math.inf  # when the client must have read
        self._idle_until_s = math.inf  # when a lane's connection without a request is closed
        self._quiet_after = -1  # requests read when it was last found idle, the door closing

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) else ""
        reason = self._door.enter(self, self.host)
        if reason is not None:
            self.transport.write(_answer(reason))
            self.transport.close()
            return
        self._reader = RequestReader(self._door.limits, self._door.trusts(self.host))
        self._read_by_s = self._door.clock() + self._door.terms().head_s
        if self._hot:
            self._lane = Lane(self, self._hot)
            tcp_keepalive(self.transport)
            self.became_idle()
        else:
            self._connect()

    def data_received(self, data: bytes) -> None:
        if self._lane is None and self._server is None:
            return
        reader = self._reader
        if reader.refused is not None:
            return
        whole = reader.feed(data)
        if whole:
            self._pass(whole)
        if reader.refused is not None:
            self._refuse(reader.refused)
        elif self._begun():
            self._wait()
        else:
            self._read_by_s = math.inf
        if self._held_bytes != reader.held_bytes:
            self._count(reader.held_bytes)

    def eof_received(self) -> None:
        """A client that ends its side counts as gone: the transport closes."""

    def pause_writing(self) -> None:
        self._write_by_s = self._door.clock() + self._door.terms().client_s
        if self._lane is not None:
            self._lane.pause()
        elif self._server is not None:
            self._server.pause_writing()

    def resume_writing(self) -> None:
        self._write_by_s = math.inf
        if self._lane is not None:
            self._lane.resume()
        elif self._server is not None:
            self._server.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self, self.host)
        lane, self._lane = self._lane, None
        server, self._server = self._server, None
        if lane is not None or server is not None:
            self._count(0)
            self._reader.stop("lost")
        if lane is not None:
            lane.lost()
        if server is not None:
            server.connection_lost(exc)

    # What the door calls.

    def look(self, now_s: float) -> None:
        """Give up what is late."""
        if now_s >= self._write_by_s:
            self._door.count("slow_close" if self.transport.is_closing() else "slow_reader")
            self.transport.abort()
        elif self.transport.is_closing():
            if self._write_by_s == math.inf:
                self._write_by_s = now_s + CLOSING_S
        elif now_s >= self._read_by_s:
            # The router may be late itself: the first time it has yet to look what has come.
            if self._overdue:
                self._late()
            self._overdue = not self._overdue
        elif self._idle() and not self._begun() and self._may_close(now_s):
            self.transport.close()

    def leave(self) -> asyncio.Task[None] | None:
        """Serve no more than what the door is answering, whose task is returned; None: nothing."""
        return None if self._lane is None else self._lane.leave()

    def refuse(self, reason: str) -> None:
        """Answer with a refusal, after what is being answered, and close."""
        self._reader.stop(reason)
        self._count(0)
        self._refuse(reason)

    # What its lane calls.

    @property
    def closing(self) -> bool:
        """Each request is the last one."""
        return self._door.closing

    def became_idle(self) -> None:
        """All that came was answered."""
        self._idle_until_s = self._door.clock() + self._door.terms().keep_alive_s

    def hand_over(self, requests: list[Whole]) -> None:
        """Give these, and all that comes, to the server behind."""
        paused = self._lane is not None and self._lane.writing_paused
        self._lane = None
        self._idle_until_s = math.inf
        server = self._connect()
        if paused:
            server.pause_writing()
        self._pass(requests)
        if self._begun():
            server.keep_alive(True)

    # Our own.

    def _connect(self) -> RequestHandler:
        self._server = server = self._server_of()
        server.connection_made(self.transport)
        return server

    def _pass(self, whole: list[Whole]) -> None:
        if self._lane is not None:
            self._lane.take(whole)
        elif self._server is not None:
            self._server.data_received(b"".join([one.text for one in whole]))

    def _begun(self) -> bool:
        """A part of a request has come."""
        return self._reader.held_bytes > 0 or self._reader.in_body

    def _late(self) -> None:
        self._read_by_s = math.inf
        if not self.transport.is_reading():  # the server paused it, or holds back the rest
            self._read_by_s = self._door.clock() + self._door.terms().head_s
        elif self._reader.in_body:
            self.refuse("late_body")
        elif self._reader.in_head:
            self.refuse("late_head")
        else:  # it never said a word
            self._door.count("silent")
            self.transport.close()

    def _wait(self) -> None:
        """A request has begun: it must be whole in time, and the server must not end the wait."""
        reader, terms = self._reader, self._door.terms()
        part = reader.requests, reader.in_body
        if part != self._part:
            self._part = part
            self._overdue = False
            seconds = terms.body_s if reader.in_body else terms.head_s
            self._read_by_s = self._door.clock() + seconds
        if self._server is not None:
            self._server.keep_alive(True)
        if reader.wants_continue and self._idle():
            self.transport.write(_CONTINUE)

    def _refuse(self, reason: str) -> None:
        self._door.count(reason)
        self._read_by_s = math.inf
        self._pass([Whole(Head(self._door.refusal_request(reason), 0), b"")])

    def _count(self, held_bytes: int) -> None:
        more = held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if not self._door.hold(more):
            self.refuse("bodies_full")

    def _may_close(self, now_s: float) -> bool:
        """Whether an idle connection has lived for long enough. Where another router listens that
        is soon: it was idle at the last look, and nothing has come that is yet to be read.
        """
        if now_s >= self._idle_until_s:
            return True
        if not self._door.closing:
            return False
        before, self._quiet_after = self._quiet_after, self._reader.requests
        return before == self._quiet_after and not _unread_bytes(self.transport)

    def _idle(self) -> bool:
        """Nothing is being answered: what is written now stands where the client expects it.

        Looks at what aiohttp (3.14) waits for a request with.
        """
        if self._lane is not None:
            return self._lane.idle
        waiter = None if self._server is None else self._server._waiter
        return self._reader.requests == 0 or (waiter is not None and not waiter.done())


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What the system has for a connection that nobody has read yet."""
    number = transport.get_extra_info("socket").fileno()
    return int.from_bytes(ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)


def _answer(reason: str) -> bytes:
    """A refusal for which there is no server."""
    refusal = REFUSALS[reason]
    body = error_body(refusal.message, error_type(refusal.status), code=reason)
    head = (
        f"HTTP/1.1 {refusal.status} Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
