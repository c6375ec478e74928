"""Real sockets for the relay's tests: scripted workers, raw clients, and a tiny app
between them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from kvkernels import AnswerDue
from router.http.errors import WorkerError
from router.http.messages import Answer, Handler, Request, error_response
from router.http.reply import Outcome, RelayLimits, Timeouts
from router.upstream.client_reply import ClientReply, upstream_request
from router.upstream.fallback import Upstream
from router.upstream.native import NativeRelay, NativeUpstream
from tests.router.server_support import LIMITS, serving
from tests.router.waiting import DEADLINE_S, until

BOTH_PATHS = (pytest.param("python", marks=pytest.mark.live), "native")
# The implementation of the relays made here: "python" or "native"; set by the fixture `both_paths`.
PATH = "python"

TLS: ssl.SSLContext | None = None  # of servers for clients

Script = Callable[["WorkerCall"], Awaitable[None]]


def use_implementation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the relays of this test use the implementation `path`."""
    if path == "native" and not NativeRelay.usable():
        pytest.skip("the native relay was not built: no compiler, or no Linux")
    monkeypatch.setattr(f"{__name__}.PATH", path)


@dataclass
class WorkerCall:
    """One request as a scripted worker received it, and the connection to reply on."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    serial: int  # requests on this connection before it

    async def send(self, data: bytes) -> None:
        """Send bytes to the relay and wait until they are written."""
        self.writer.write(data)
        await self.writer.drain()

    async def send_in_pieces(self, data: bytes, cuts: list[int]) -> None:
        """Send bytes so that the relay reads them cut at `cuts`."""
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            await self.send(data[start:stop])
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        """Close the connection without ending the reply."""
        self.writer.close()

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class Worker:
    """A worker that follows a script for every request it reads."""

    script: Script
    port: int = 0
    calls: list[WorkerCall] = field(default_factory=list)
    connections: int = 0  # accepted so far
    gone: int = 0  # ended so far
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        serial = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = header(head, b"content-length")
                body = await reader.readexactly(int(length or 0))
                call = WorkerCall(head, body, reader, writer, serial)
                self.calls.append(call)
                serial += 1
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone += 1
            self.writers.discard(writer)
            writer.close()


def header(head: bytes, name: bytes) -> bytes | None:
    """Return the first value of a header, or None if it is absent."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


@asynccontextmanager
async def worker(script: Script) -> AsyncIterator[Worker]:
    """Yield a scripted worker on a free port."""
    it = Worker(script)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0, limit=1 << 24)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()
        for writer in tuple(it.writers):
            writer.transport.abort()
        await until(lambda: not it.writers, "the worker's connections end")


@dataclass
class Relay:
    """A tiny app that sends each request to its workers in order and records each outcome."""

    upstreams: list[Upstream]
    timeouts: Timeouts
    buffer_bytes: int
    due: AnswerDue | None = None
    once: bool = False  # its requests are not sent again by a fresh connection
    port: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    cancelled: int = 0
    first_bytes_s: list[float] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    replies: list[ClientReply] = field(default_factory=list)

    async def handle(self, request: Request) -> Answer:
        sent = upstream_request(request, request.body, due=self.due, once=self.once)
        reply = ClientReply(request, self.buffer_bytes, ((b"X-Warmroute-Worker", b"w"),))
        self.replies.append(reply)
        outcome = None
        for upstream in self.upstreams:
            try:
                outcome = await upstream.send(
                    sent,
                    reply,
                    self.timeouts,
                    self.first_bytes_s.append,
                    lambda now_s, events: self.progress.append(events),
                )
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            self.outcomes.append(outcome)
            if not outcome.retryable:
                if outcome.held is not None:  # a refusal that is for its client
                    outcome.held.deliver(reply)
                return reply
        assert outcome is not None
        if outcome.held is not None:
            outcome.held.deliver(reply)
            return reply
        return error_response(502, str(outcome.error))


@asynccontextmanager
async def relay(
    *ports: int,
    timeouts: Timeouts | None = None,
    limits: RelayLimits | None = None,
    buffer_bytes: int = 65_536,
    due: AnswerDue | None = None,
) -> AsyncIterator[Relay]:
    """Yield the tiny app in front of the workers on `ports`."""
    async with upstreams_to(*ports, limits=limits) as upstreams:
        it = Relay(upstreams, timeouts or Timeouts(), buffer_bytes, due)
        async with served(it.handle) as it.port:
            yield it


@asynccontextmanager
async def upstreams_to(
    *ports: int, limits: RelayLimits | None = None
) -> AsyncIterator[list[Upstream]]:
    """Yield upstreams of the implementation under test, one for each port."""
    thread = NativeRelay()
    upstreams: list[Upstream] = []
    for port in ports:
        if PATH == "native":
            upstreams.append(
                NativeUpstream(thread, "127.0.0.1", port, time.monotonic, limits=limits)
            )
        else:
            upstreams.append(Upstream("127.0.0.1", port, time.monotonic, limits=limits))
    try:
        yield upstreams
    finally:
        for upstream in upstreams:
            await upstream.aclose()
            assert upstream.open_connections == 0
        thread.stop()


@asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[int]:
    """Yield the port of a client-port server that gives every request to `handle`."""
    limits = replace(LIMITS, body_bytes=1 << 26)
    async with serving(handle, limits, tls=TLS, paths=()) as it:
        yield it.port


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: 1\n\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def send_ok(call: WorkerCall) -> None:
    """Send a complete and correct reply."""
    await call.send(OK)


def kind(error: Exception | None) -> str:
    """Return the kind of a worker's error; fails if the error is not blamed on a worker."""
    assert isinstance(error, WorkerError), error
    return error.kind


async def fetch(port: int, request: bytes) -> bytes:
    """Send raw bytes to the port and return what comes until the connection ends."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


def post(
    body: bytes = b"{}", *headers: bytes, version: bytes = b"1.1", close: bool = True
) -> bytes:
    """Return the bytes of a POST request."""
    lines = [
        b"POST /v1/completions?x=1 HTTP/" + version,
        b"Host: client-side",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    if close:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    """Return the pieces as a chunked body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


async def read_reply(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of the next reply on a kept connection; reads both lengths and
    chunks.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    length = header(head, b"content-length")
    if length is not None:
        return head, await reader.readexactly(int(length))
    assert header(head, b"transfer-encoding") == b"chunked", head
    body = b""
    while True:
        size = int((await reader.readline()).partition(b";")[0], 16)
        if not size:
            break
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    while await reader.readline() != b"\r\n":
        pass
    return head, body
