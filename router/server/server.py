"""The client port's HTTP server, its connections and their limits."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import ssl
import sys
import termios
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.tcp_helpers import tcp_keepalive

from kvkernels import PlainHead
from router.request.errors import ClientError, error_body, error_type
from router.server.parser import Head, RequestLimits, RequestReader, Whole
from router.server.responses import NO_SNIFFING, REFUSALS, Answering, Handler, error_response
from router.upstream.client_reply import ClientReply

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler


Network = IPv4Network | IPv6Network


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """A peer's address; None for what is none, as of a Unix socket.

    A socket that listens on "::" shows IPv4 peers as IPv6: those are given as IPv4.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def trusts(networks: tuple[Network, ...], host: str) -> bool:
    """Whether the peer's address lies in one of `networks`."""
    address = address_of(host) if networks else None
    return address is not None and any(address in network for network in networks)


def counted_as(host: str) -> str:
    """What connections of one client are counted under: an IPv6 client has a /64 of addresses."""
    address = address_of(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, 64), strict=False))
    return host if address is None else str(address)


log = logging.getLogger(__name__)

# Handlers by path, for requests that the door may serve itself.
HOT: web.AppKey[Mapping[str, Answering]] = web.AppKey("hot", dict)

_WAITING = 16  # requests that came before an earlier one was answered: no more are read
_WAITING_BYTES = 1 << 20


class Connection(Protocol):
    """What a lane needs of the connection that it serves."""

    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def host(self) -> str: ...
    @property
    def closing(self) -> bool: ...  # each request is the last one
    def hand_over(self, requests: list[Whole]) -> None:
        """Give these, and all that comes, to the server behind."""

    def became_idle(self) -> None:
        """All that came was answered."""


class HotRequest:
    """A plain request as its handler sees it: a `ClientRequest`. Lifetime: request."""

    __slots__ = ("_body", "_lane", "headers", "output_size", "path", "raw_path", "whole")

    method = "POST"
    version = HttpVersion11

    def __init__(self, lane: Lane, whole: Whole, headers: PlainHead, path: str) -> None:
        self._lane = lane
        self._body = whole.body
        self.headers = headers
        self.raw_path = whole.head.target
        self.path = path
        self.output_size = 0  # bytes of the answer, written so far
        self.whole = False  # the answer is

    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self.headers.fields()

    @property
    def remote(self) -> str | None:
        return self._lane.connection.host or None

    @property
    def keep_alive(self) -> bool:
        return self._lane.goes_on

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._lane.transport

    @property
    def protocol(self) -> Lane:
        return self._lane

    @property
    def writer(self) -> HotRequest:
        return self

    async def drain(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        await self._lane.drained()

    async def read(self) -> bytes:
        """The whole body."""
        return self._body


class Lane:
    """Lifetime: connection, until the server behind gets it."""

    __slots__ = (
        *("_drained", "_held_up", "_hot", "_last", "_leaving", "_waiting", "_waiting_bytes"),
        *("connection", "task", "transport", "writing_paused"),
    )

    def __init__(self, connection: Connection, hot: Mapping[str, Answering]) -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = connection.transport  # None: the client is gone
        self.task: asyncio.Task[None] | None = None  # of the request that is being answered
        self.writing_paused = False
        self._hot = hot
        self._waiting: deque[Whole] = deque()
        self._waiting_bytes = 0
        self._held_up = False  # no more is read until these are dealt with
        self._last = False  # the request that is being answered is the connection's last one
        self._leaving = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Nothing is being answered."""
        return self.task is None

    @property
    def goes_on(self) -> bool:
        """The connection outlives the request that is being answered."""
        return self.transport is not None and not (self._last or self._leaving)

    def take(self, requests: list[Whole]) -> None:
        """Answer these after those that came before."""
        if self.transport is None or self.transport.is_closing():
            return
        self._waiting.extend(requests)
        if self.task is None:
            self._next()
        else:
            self._waiting_bytes += sum(len(whole.body) for whole in requests)
            full = len(self._waiting) > _WAITING or self._waiting_bytes > _WAITING_BYTES
            if full and not self._held_up:
                self._held_up = True
                self.transport.pause_reading()

    def pause(self) -> None:
        """The client reads more slowly than we write."""
        self.writing_paused = True

    def resume(self) -> None:
        """It has read."""
        self.writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drained(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        if self.writing_paused:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    def leave(self) -> asyncio.Task[None] | None:
        """Serve no more after the request that is being answered, whose task is returned."""
        self._leaving = True
        if self.task is None and self.transport is not None:
            self.transport.close()
        return self.task

    def lost(self) -> None:
        """The client is gone; what is being answered ends."""
        self.transport = None
        self._waiting.clear()
        if self.task is not None:
            self.task.cancel()

    def _next(self) -> None:
        """Begin with the next request, or hand over, or wait for one."""
        if not self._waiting:
            self.connection.became_idle()
            return
        whole = self._waiting.popleft()
        head = whole.head
        path = head.target.partition("?")[0]
        answering = self._hot.get(path) if head.method == "POST" else None
        if answering is None or head.plain is None:
            self._hand_over([whole, *self._waiting])
            return
        self._last = head.last or self.connection.closing
        request = HotRequest(self, whole, head.plain, path)
        self.task = asyncio.get_running_loop().create_task(self._answer(request, answering))

    def _hand_over(self, requests: list[Whole]) -> None:
        self._waiting.clear()
        self._read_on()
        self.transport = None
        self.connection.hand_over(requests)

    async def _answer(self, request: HotRequest, answering: Answering) -> None:
        goes_on = False
        try:
            goes_on = self._give(request, await answering(request))
        except OSError as error:
            log.debug("a client left: %r", error)
        except Exception:
            log.exception("failed to answer %s", request.path)
        finally:
            self.task = None
            if not goes_on:
                self._end(request)
        if goes_on:
            self._next()
            self._read_on()

    def _give(self, request: HotRequest, answer: web.StreamResponse) -> bool:
        """Write what was not relayed; whether the connection goes on."""
        if isinstance(answer, ClientReply):  # the relay has written it
            request.whole = True
            return bool(answer.keep_alive) and self.goes_on
        assert isinstance(answer, web.Response), "an answer is relayed, or ours and whole"
        if self.transport is None:
            return False
        if request.output_size:  # another answer has begun
            return False
        goes_on = self.goes_on and answer.keep_alive is not False
        self.transport.write(_text(answer, goes_on))
        return goes_on

    def _end(self, request: HotRequest) -> None:
        """The connection ends; what was not relayed to its end must not look whole."""
        if self.transport is None:
            return
        if request.output_size and not request.whole:
            self.transport.abort()
        else:
            self.transport.close()

    def _read_on(self) -> None:
        """Read what comes, once what had come before is dealt with."""
        if self._waiting:
            return
        self._waiting_bytes = 0
        transport = self.transport
        if self._held_up and transport is not None and not transport.is_closing():
            self._held_up = False
            transport.resume_reading()


def _text(answer: web.Response, goes_on: bool) -> bytes:
    """An answer that is no worker's, as HTTP."""
    body = answer.body or b""
    assert isinstance(body, bytes), "an answer of ours is whole"
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if "Content-Type" not in answer.headers:
        lines.append("Content-Type: application/octet-stream")
    lines += [f"Content-Length: {len(body)}", f"Date: {rfc822_formatted_time()}"]
    lines.append(": ".join(NO_SNIFFING))
    if not goes_on:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


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
