"""Runs the HTTP server of a port: its connections, their limits, and the order of their answers."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from fcntl import ioctl
from typing import Any, Protocol, cast

from router.http.addresses import Network, counted_as, trusts
from router.http.messages import REFUSALS, Answer, Request, Response
from router.http.parser import RequestLimits, RequestReader, Whole

log = logging.getLogger(__name__)

LOOK_S = 0.5  # interval between two checks for late connections, seconds
CLOSING_S = 30.0  # time that a client has to read the rest of the last answer, seconds
LINGER_S = 2.0  # time that a refused client has to stop sending, seconds
# An address counts as hostile while more than a fifth of its latest requests are refused. The first
# bytes of its connections wait for others: one is read every few turns of the event loop, more if
# many wait. Otherwise a wave of them would be served before all others.
DEFER_TURNS, DEFERRED_AT_ONCE = 4, 64
_FAULT, _MOST_FAULTS = 4, 64  # weight of one against right requests, and of all: half a minute
_MAX_HOSTILE = 4096  # most addresses that are remembered because they sent invalid requests
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_PIPELINED = 16  # most pipelined requests of a connection that wait for an earlier answer
_MAX_PIPELINED_BYTES = 1 << 20


class Application(Protocol):
    """An application that answers the requests of a port."""

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request. Raises OSError if the client left."""

    def faulty(self, status: int) -> None:
        """Note that a request was refused with `status`."""


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """The limits for a port's connections. Lifetime: process, replaced on reload."""

    connections: int  # in all
    connections_per_address: int  # 0: any number
    held_bytes: int  # of requests that are still arriving, in all
    head_s: float  # from its first byte, or the connection's beginning, to its last
    body_s: float  # for a whole body to arrive
    client_s: float  # for a client to read waiting bytes
    keep_alive_s: float = 75.0  # without a request
    files: int = sys.maxsize  # open ones, of any kind, beyond which no client is let in


class HttpServer:
    """The HTTP server of one port. Lifetime: process."""

    def __init__(
        self,
        limits: RequestLimits,
        terms: ServerTerms,
        trusted: tuple[Network, ...],
        clock: Callable[[], float],
    ) -> None:
        """Start without connections. `clock` returns monotonic seconds; peers in the `trusted`
        networks may send private headers.
        """
        self.limits = limits
        self.terms = terms  # replaced on reload
        self.clock = clock
        self.application: Application
        self.refusals: Counter[str] = Counter()  # by reason
        self.held_bytes = 0
        self.deferred = 0  # connections, so far
        # Each connection gets one answer more, which says `Connection: close`; one that asks for
        # none is closed between half a second and a second later. Closed at once, most clients
        # that send on a kept connection would get no answer.
        self.closing = False
        self._trusted = trusted
        self._connections: set[Connection] = set()
        self._of_address: Counter[str] = Counter()
        self._faults: dict[str, int] = {}  # by address; less with every right request and look
        self._deferred: deque[Connection] = deque()
        self._listening: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()  # no connection was open at some moment
        self._address = ""  # where it listens, for people
        self._date = (0, "")  # unix seconds, and as headers have them

    async def listen(
        self,
        application: Application,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
        reuse_port: bool = False,
    ) -> tuple[str, int]:
        """Begin to serve `application`. Return the address, which is needed if `port` is 0. Raises
        OSError if the port is taken.

        `sockets` are bound sockets to listen on instead of `host` and `port`; `reuse_port` lets
        other processes listen there, too.
        """
        self.application = application
        options: dict[str, Any] = {"backlog": 1024}
        if tls is not None:
            tls.sslobject_class = _counted(self)
            # A handshake is the first part of what a client must complete in time.
            options |= {"ssl": tls, "ssl_handshake_timeout": self.terms.head_s}
        loop = asyncio.get_running_loop()
        places: list[dict[str, Any]] = [{"sock": one} for one in sockets]
        for place in places or [{"host": host, "port": port, "reuse_port": reuse_port}]:
            self._listening.append(
                await loop.create_server(lambda: Connection(self), **place, **options)
            )
        self._look_again()
        bound = self._listening[0].sockets[0].getsockname()
        self._address = f"{bound[0]}:{bound[1]}"
        return str(bound[0]), int(bound[1])

    def accept_no_more(self) -> None:
        """Stop listening; open connections are kept."""
        for server in self._listening:
            server.close()
        self._listening.clear()

    async def aclose(self, within_s: float) -> None:
        """Stop listening, let each connection end (`closing`), and cut off connections that take
        longer than `within_s` seconds.
        """
        self.closing = True
        self.accept_no_more()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.left()
        tasks = [task for one in tuple(self._connections) if (task := one.give_up()) is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def connections(self) -> int:
        """The number of open connections, including those that are being refused."""
        return len(self._connections)

    async def left(self) -> None:
        """Wait until no connection is open."""
        while self._connections:
            self._emptied.clear()
            await self._emptied.wait()

    def look(self) -> None:
        """Close connections whose clients are too slow, and lower the count of each address's
        invalid requests.
        """
        now_s = self.clock()
        for connection in tuple(self._connections):
            connection.look(now_s)
        if self._faults:
            self._faults = {name: count - 1 for name, count in self._faults.items() if count > 1}

    def date(self) -> str:
        """Return the present time for the header `Date`."""
        now = int(time.time())
        if now != self._date[0]:
            self._date = (now, formatdate(now, usegmt=True))
        return self._date[1]

    # Methods that connections call.

    def trusts(self, host: str) -> bool:
        """Return whether the peer may send headers that only routers send."""
        return trusts(self._trusted, host)

    def hostile(self, name: str) -> bool:
        """Return whether requests of this address must wait for all others, because it sent invalid
        requests lately.
        """
        return name in self._faults

    def faulty(self, name: str) -> None:
        """Note that this address sent something that is not a valid request."""
        count = self._faults.get(name, 0)
        if count or len(self._faults) < _MAX_HOSTILE:
            self._faults[name] = min(count + _FAULT, _MOST_FAULTS)

    def right(self, name: str) -> None:
        """Note that an address that had sent invalid requests sent a valid one."""
        self._faults[name] -= 1
        if self._faults[name] <= 0:
            del self._faults[name]

    def defer(self, connection: Connection) -> None:
        """Let a connection continue to be read after other connections had their turn."""
        self.deferred += 1
        self._deferred.append(connection)
        if len(self._deferred) == 1:
            asyncio.get_running_loop().call_soon(self._next_deferred, DEFER_TURNS)

    def _next_deferred(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._next_deferred, turns - 1)
            return
        for _ in range(1 + len(self._deferred) // DEFERRED_AT_ONCE):
            self._deferred.popleft().process_deferred()
        if self._deferred:
            loop.call_soon(self._next_deferred, DEFER_TURNS)

    def enter(self, connection: Connection, file: int) -> str | None:
        """Register a new connection. Return the reason if it must be refused, otherwise None.

        `file` is its file number, the lowest that was free: about so many files are open.
        """
        terms = self.terms
        self._connections.add(connection)
        reason = None
        if file >= terms.files:
            reason = "too_many_files"
        elif len(self._connections) > terms.connections:
            reason = "too_many_connections"
        name = connection.name
        self._of_address[name] += 1
        if 0 < terms.connections_per_address < self._of_address[name]:
            reason = reason or "too_many_of_address"
        if reason is not None:
            self.count(reason)
        return reason

    def leave(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()
        name = connection.name
        self._of_address[name] -= 1
        if self._of_address[name] <= 0:
            del self._of_address[name]

    def hold(self, more_bytes: int) -> bool:
        """Add `more_bytes` to the size of all unfinished requests. Return False if that is more
        than allowed.
        """
        self.held_bytes += more_bytes
        return more_bytes <= 0 or self.held_bytes <= self.terms.held_bytes

    def count(self, reason: str) -> None:
        """Count a connection or request that was refused; log it at its 1st, 2nd, 4th, 8th ...
        occurrence.
        """
        self.refusals[reason] += 1
        count = self.refusals[reason]
        if count & (count - 1) == 0:
            refusal = REFUSALS.get(reason)
            why = "" if refusal is None else f": {refusal.message}"
            line = "turned away: %s (%d so far) at %s%s"
            log.warning(line, reason, count, self._address or "no port", why)

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        self.look()


class Connection(asyncio.Protocol):
    """One client's connection, whose requests are answered one after the other. Lifetime: a TCP (or
    TLS) connection.
    """

    __slots__ = (
        *("host", "name", "transport", "writing_paused", "lent_to"),
        *("_server", "_reader", "_task", "_refusal"),
        *("_waiting", "_waiting_bytes", "_held_up", "_last", "_drained"),
        *("_held_bytes", "_part", "_overdue", "_read_by_s", "_write_by_s", "_idle_until_s"),
        *("_quiet_after", "_hostile", "_deferred"),
    )

    def __init__(self, server: HttpServer) -> None:
        self.host = self.name = ""  # the peer's address, and the name under which it is counted
        self.transport: asyncio.Transport | None = None  # None: the client is gone
        self.writing_paused = False
        # Asks for the socket back while another part writes to it, because after the close its
        # number may belong to another client.
        self.lent_to: Callable[[], object] | None = None
        self._server = server
        self._reader: RequestReader
        self._task: asyncio.Task[None] | None = None  # of the request that is being answered
        self._refusal: Response | None = None  # to be written after all answers
        self._waiting: deque[Whole] = deque()  # requests that came before their turn
        self._waiting_bytes = 0
        self._held_up = False  # no more is read until these are dealt with
        self._last = False  # the request that is being answered is the connection's last one
        self._drained: asyncio.Future[None] | None = None
        self._held_bytes = 0  # of an unfinished request, as the server counts them
        self._part = (0, False)  # requests before the one that has begun; whether in its body
        # Found late once: bytes that had arrived by then are read before it counts as late.
        self._overdue = False
        self._read_by_s = math.inf  # when a begun request must be complete
        self._write_by_s = math.inf  # when the client must have read
        self._idle_until_s = math.inf  # when a connection without a request is closed
        self._quiet_after = -1  # requests read when it was last found idle, the server closing
        self._hostile = False  # nothing of it was read yet, and its bytes wait for others
        self._deferred = b""  # so long

    # Methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._server
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) else ""
        sock = transport.get_extra_info("socket")
        self.name = counted_as(self.host)
        reason = server.enter(self, -1 if sock is None else sock.fileno())
        trusted = server.trusts(self.host)
        self._reader = RequestReader(server.limits, trusted)
        self._hostile = not trusted and server.hostile(self.name)
        if reason is not None:
            self._reader.stop(reason)
            self.transport.write(REFUSALS[reason].response(0).text(server.date(), goes_on=False))
            if reason == "too_many_files":  # its file is wanted back
                self.transport.close()
            else:
                self._linger(self.transport)
            return
        terms, now_s = server.terms, server.clock()
        self._read_by_s = now_s + terms.head_s
        self._idle_until_s = now_s + terms.keep_alive_s
        if sock is not None:  # notice clients whose machine disappears silently
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.refused is not None:
            return
        if self._hostile:
            self._defer(data)
            return
        whole = reader.feed(data)
        if whole:
            self._take(whole)
        if reader.refused is not None:
            self._refuse(reader.refused)
        elif self._begun:
            self._wait()
        else:
            self._read_by_s = math.inf
        if self._held_bytes != reader.held_bytes:
            self._count(reader.held_bytes)

    def eof_received(self) -> None:
        """Close the connection, because a client that ends its side counts as gone."""

    def pause_writing(self) -> None:
        self._write_by_s = self._server.clock() + self._server.terms.client_s
        self.writing_paused = True

    def resume_writing(self) -> None:
        self._write_by_s = math.inf
        self.writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lent_to is not None:
            self.lent_to()
        self._server.leave(self)
        self.transport = None
        self._deferred = b""
        self._count(0)
        self._reader.stop("lost")
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    # Methods that the server calls.

    def look(self, now_s: float) -> None:
        """Close the connection if its client is too slow at the time `now_s`."""
        if self.transport is None:
            return
        if now_s >= self._write_by_s:
            self._server.count("slow_close" if self.transport.is_closing() else "slow_reader")
            self.transport.abort()
        elif self.transport.is_closing():
            if self._write_by_s == math.inf:
                self._write_by_s = now_s + CLOSING_S
        elif now_s >= self._read_by_s:
            # The router may be late itself: the first time it only reads the bytes that have
            # arrived.
            if self._overdue:
                self._late(self.transport)
            self._overdue = not self._overdue
        elif self._task is None and not self._begun and self._may_close(now_s):
            self.transport.close()

    def give_up(self) -> asyncio.Task[None] | None:
        """End the connection now. If a request is being answered, cancel it and return its task."""
        if self._task is not None:
            self._task.cancel()
        elif self.transport is not None:
            self.transport.close()
        return self._task

    def process_deferred(self) -> None:
        """Process the bytes that were deferred because their address had sent invalid requests."""
        data, self._deferred = self._deferred, b""
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    # Methods that the request being answered calls.

    @property
    def goes_on(self) -> bool:
        """True if the connection stays open after the request that is being answered."""
        return self.transport is not None and not (self._last or self._server.closing)

    async def drain(self) -> None:
        """Wait until the client has read its bytes. Raises ConnectionError if the client is
        gone.
        """
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        if self.writing_paused:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    # Reading.

    @property
    def _begun(self) -> bool:
        """True if a part of a request has arrived."""
        reader = self._reader
        return reader.held_bytes > 0 or reader.in_body or bool(self._deferred)

    def _defer(self, data: bytes) -> None:
        self._hostile = False
        if self.transport is None or self.transport.is_closing():
            return
        self._deferred = data
        self.transport.pause_reading()
        self._server.defer(self)
        self._count(len(data))

    def _wait(self) -> None:
        """Set the time by which the request that has begun to arrive must be complete."""
        reader, terms = self._reader, self._server.terms
        part = reader.requests, reader.in_body
        if part != self._part:
            self._part = part
            self._overdue = False
            seconds = terms.body_s if reader.in_body else terms.head_s
            self._read_by_s = self._server.clock() + seconds
        if reader.wants_continue and self._task is None and self.transport is not None:
            self.transport.write(_CONTINUE)

    def _late(self, transport: asyncio.Transport) -> None:
        self._read_by_s = math.inf
        if not transport.is_reading():  # we hold back the rest
            self._read_by_s = self._server.clock() + self._server.terms.head_s
        elif self._reader.in_body:
            self._stop("late_body")
        elif self._reader.in_head:
            self._stop("late_head")
        else:  # it never said a word
            self._server.count("silent")
            transport.close()

    def _stop(self, reason: str) -> None:
        self._reader.stop(reason)
        self._count(0)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Send a refusal after the answer that is being written, and close the connection."""
        self._server.count(reason)
        self._read_by_s = math.inf
        refusal = REFUSALS[reason]
        if refusal.status < 500:
            self._server.faulty(self.name)
        self._server.application.faulty(refusal.status)
        self._refusal = refusal.response(self._server.limits.body_bytes)
        if self._task is None:
            self._next()

    def _count(self, held_bytes: int) -> None:
        more = held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if not self._server.hold(more):
            self._stop("bodies_full")

    def _may_close(self, now_s: float) -> bool:
        """Return whether an idle connection may be closed now.

        If another router listens by now, it may be closed soon: if the connection was already idle
        at the last check, and no unread bytes have arrived since.
        """
        if now_s >= self._idle_until_s:
            return True
        if not self._server.closing:
            return False
        before, self._quiet_after = self._quiet_after, self._reader.requests
        return before == self._quiet_after and not _unread_bytes(self.transport)

    # Answering.

    def _take(self, requests: list[Whole]) -> None:
        """Queue these requests after the earlier ones of the connection."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._server.hostile(self.name):
            self._server.right(self.name)
        self._waiting.extend(requests)
        if self._task is None:
            self._next()
        else:
            self._waiting_bytes += sum(whole.head.length for whole in requests)
            full = len(self._waiting) > _MAX_PIPELINED or self._waiting_bytes > _MAX_PIPELINED_BYTES
            if full and not self._held_up:
                self._held_up = True
                transport.pause_reading()

    def _next(self) -> None:
        """Begin to answer the next request; or refuse bytes after the last allowed one; or wait for
        a request.
        """
        server = self._server
        if self._waiting:
            whole = self._waiting.popleft()
            self._last = whole.head.last or server.closing
            self._task = asyncio.get_running_loop().create_task(self._answer(whole))
        elif self._refusal is not None:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.write(self._refusal.text(server.date(), goes_on=False))
                self._linger(self.transport)
        else:
            self._idle_until_s = server.clock() + server.terms.keep_alive_s
            if self._reader.wants_continue and self.transport is not None:
                self.transport.write(_CONTINUE)

    def _linger(self, transport: asyncio.Transport) -> None:
        """End the router's side of the connection, and for a while read and drop what the client
        still sends.

        If the connection were closed with unread bytes, the system would reset it, and the client
        might never see its answer.
        """
        if not transport.can_write_eof():  # TLS
            transport.close()
            return
        transport.write_eof()
        transport.resume_reading()
        self._idle_until_s = self._server.clock() + LINGER_S

    async def _answer(self, asked: Whole) -> None:
        goes_on = whole = False
        several = len(asked.pieces) > 1
        request = Request(self, asked.head, b"" if several else asked.body)
        try:
            if several:
                request.body = await asyncio.to_thread(b"".join, asked.pieces)
            answer = await self._server.application.answer(request)
            if isinstance(answer, Response):
                whole = not request.written_bytes  # else a relayed one had begun
                goes_on = whole and self._write(request, answer)
            else:  # the relay has written it
                whole = True
                goes_on = answer.keep_alive and self.transport is not None
        except OSError as error:
            log.debug("a client left: %r", error)
        except Exception:
            log.exception("failed to answer %s", request.path)
        finally:
            self._task = None
            if not goes_on:
                self._end(cut=request.written_bytes > 0 and not whole)
        if goes_on:
            self._next()
            self._read_on()

    def _write(self, request: Request, answer: Response) -> bool:
        """Write an answer that the router made itself. Return whether the connection stays open."""
        if self.transport is None:
            return False
        goes_on = self.goes_on and answer.keep_alive
        text = answer.text(
            self._server.date(),
            goes_on=goes_on,
            http_1_0=request.http_1_0,
            head=request.method == "HEAD",
        )
        self.transport.write(text)
        return goes_on

    def _end(self, cut: bool) -> None:
        """End the connection. `cut` True means that a relayed reply is incomplete and must not look
        complete.
        """
        if self.transport is None:
            return
        if cut:
            self.transport.abort()
        else:
            self.transport.close()

    def _read_on(self) -> None:
        """Read further bytes, once all earlier ones are processed."""
        if self._waiting:
            return
        self._waiting_bytes = 0
        transport = self.transport
        if self._held_up and transport is not None and not transport.is_closing():
            self._held_up = False
            transport.resume_reading()


def _counted(server: HttpServer) -> type[ssl.SSLObject]:
    """Return a subclass of the TLS class that counts failed handshakes, because event loops do not
    report them.
    """

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                server.count("bad_handshake")
                raise

    return Counted


def _unread_bytes(transport: asyncio.Transport | None) -> int:
    """Return the number of bytes that the system has received on a connection and nobody
    has read.
    """
    if transport is None:
        return 0
    number = transport.get_extra_info("socket").fileno()
    return int.from_bytes(ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)
