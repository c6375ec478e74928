"""Tests of workers that fail: the client never takes a broken reply for a whole one, and the
failure is charged exactly.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.http.messages import Answer, Request
from router.http.reply import RelayLimits, Timeouts, retry_after_s
from router.upstream.client_reply import ClientReply, upstream_request
from tests.router.relay_support import (
    DEADLINE_S,
    EVENT,
    OK,
    STREAM,
    WorkerCall,
    chunked,
    fetch,
    kind,
    post,
    relay,
    send_ok,
    served,
    until,
    upstreams_to,
    worker,
)

pytestmark = pytest.mark.usefixtures("every_path")


@contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port that refuses connections. The socket stays bound, so that no other process can
    take the port.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"", "early_close"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "early_close"),
        (STREAM, "early_close"),  # head at once, then death during the prefill
        (b"SSH-2.0-OpenSSH_9\r\n", "garbage"),
        (b"\x16\x03\x01", "garbage"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "garbage"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, "garbage"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "garbage"),
        (STREAM + b"zz\r\n", "garbage"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nboo", "status_5xx"),
        (
            b"HTTP/1.1 503 Oh\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nboo\r\n0\r\n\r\n",
            "status_5xx",
        ),
        # The answer names a time to return: a full queue.
        (b"HTTP/1.1 503 Oh\r\nretry-after: 1\r\nContent-Length: 3\r\n\r\nboo", "busy"),
        (b"HTTP/1.1 503 Oh\r\nretry-after-ms: 9\r\nContent-Length: 3\r\n\r\nboo", "busy"),
        (b"HTTP/1.1 429 Oh\r\nContent-Length: 3\r\n\r\nboo", "busy"),
        (b"HTTP/1.1 529 Oh\r\nContent-Length: 3\r\n\r\nboo", "busy"),
        (b"HTTP/1.1 500 Oh\r\nRetry-After: 1\r\nContent-Length: 3\r\n\r\nboo", "status_5xx"),
        (b"HTTP/1.1 502 Oh\r\nContent-Length: 300\r\n\r\nboo", "status_5xx"),
        (b"HTTP/1.1 504 Oh\r\n\r\nuntil the end", "status_5xx"),
    ],
)
async def test_a_failure_before_the_first_byte_is_retried_at_another_worker(
    reply: bytes, expected: str
) -> None:
    async def bad(call: WorkerCall) -> None:
        await call.send(reply)
        call.hang_up()

    async with worker(bad) as b, worker(send_ok) as g, relay(b.port, g.port) as r:
        assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
        first, second = r.outcomes
        assert kind(first.error) == expected
        assert first.retryable
        assert (first.bytes_to_client, second.error) == (0, None)
        assert (len(b.calls), len(g.calls)) == (1, 1)


async def test_an_unreachable_worker_is_replaced_by_another() -> None:
    with deaf_port() as deaf:
        async with worker(send_ok) as g, relay(deaf, g.port) as r:
            assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
            assert kind(r.outcomes[0].error) == "connect"
            assert r.outcomes[0].status is None


async def test_a_connect_that_hangs_is_given_up() -> None:
    # A listener whose backlog is full lets further connections hang.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            async with relay(port, timeouts=Timeouts(connect_s=0.05)) as r:
                assert b" 502 " in await fetch(r.port, post())
                assert kind(r.outcomes[0].error) == "timeout_connect"
        finally:
            for filler in fillers:
                filler.close()


async def test_a_worker_that_stops_reading_the_request_exceeds_the_send_timeout() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)  # the system accepts connections; no program reads them
        port = listener.getsockname()[1]
        async with relay(port, timeouts=Timeouts(send_s=0.05, first_byte_s=60.0)) as r:
            assert b" 502 " in await fetch(r.port, post(b"x" * (32 << 20)))
            assert kind(r.outcomes[0].error) == "timeout_send"
            assert r.outcomes[0].retryable


@pytest.mark.parametrize("head", [OK[:-2], STREAM + EVENT, b"HTTP/1.1 200 OK\r\n\r\nabc"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_broken_reply_never_ends_cleanly(head: bytes, version: bytes) -> None:
    started = asyncio.Event()

    async def script(call: WorkerCall) -> None:
        await call.send(head + (b"" if STREAM in head or b"\r\n\r\nabc" in head else b"o"))
        await started.wait()
        call.reset()

    async with worker(script) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(post(version=version))
        got = await reader.read(1)
        started.set()
        try:
            async with asyncio.timeout(DEADLINE_S):
                got += await reader.read()
            clean = True
        except ConnectionResetError:
            clean = False
        writer.close()
        assert kind(r.outcomes[0].error) == "early_close"
        assert not r.outcomes[0].retryable
        if b"Content-Length" in got:
            assert got.endswith(b"\r\n\r\no")  # one byte of two
        elif b"Transfer-Encoding" in got:
            assert got.endswith(EVENT)  # no last chunk
        else:
            assert not clean  # the reply ends with the connection: only a reset reveals the failure


async def test_garbage_in_mid_stream_closes_the_clients_connection() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM + EVENT)
        await until(lambda: bool(r.first_bytes_s), "the client has its first byte")
        await call.send(b"not hex\r\n")

    async with worker(script) as w, relay(w.port) as r:
        got = await fetch(r.port, post())
        assert got.endswith(EVENT)
        assert kind(r.outcomes[0].error) == "garbage"
        assert r.outcomes[0].events == 1
        await until(lambda: w.gone == 1, "the worker's connection is closed")


async def test_a_silent_worker_is_replaced_after_the_first_byte_timeout() -> None:
    async def script(call: WorkerCall) -> None:
        await call.reader.read()

    times = Timeouts(first_byte_s=0.05)
    async with (
        worker(script) as w,
        worker(send_ok) as g,
        relay(w.port, g.port, timeouts=times) as r,
    ):
        assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
        assert kind(r.outcomes[0].error) == "timeout_first_byte"
        await until(lambda: w.gone == 1, "the worker's connection is closed")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ((), 0.0),
        (((b"Retry-After", b"7"),), 7.0),
        (((b"retry-after", b" 0.25 "),), 0.25),
        (((b"Retry-After", b"-3"),), 0.0),
        (((b"Retry-After", b"nan"),), 0.0),
        (((b"Retry-After", b"soon"),), 0.0),
        (((b"Retry-After", b"\xff"),), 0.0),
        (((b"retry-after-ms", b"250"), (b"Retry-After", b"1")), 0.25),
        (
            (
                (b"Date", b"Sun, 06 Nov 1994 08:49:37 GMT"),
                (b"Retry-After", b"Sun, 06 Nov 1994 08:49:40 GMT"),
            ),
            3.0,
        ),
        (((b"Retry-After", b"Sun, 06 Nov 1994 08:49:40 GMT"),), 0.0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: tuple, seconds: float) -> None:
    assert retry_after_s(headers) == seconds


async def test_a_stream_that_stalls_is_broken_off() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM + EVENT)
        await call.reader.read()

    async with worker(script) as w, relay(w.port, timeouts=Timeouts(between_s=0.05)) as r:
        assert (await fetch(r.port, post())).endswith(EVENT)
        assert kind(r.outcomes[0].error) == "timeout_between"
        assert not r.outcomes[0].retryable


async def test_the_error_reply_of_the_last_worker_reaches_the_client() -> None:
    async def script(call: WorkerCall) -> None:
        reply = b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        await call.send(reply + chunked(b"over", b"loaded"))

    async with worker(script) as w, relay(w.port) as r:
        got = await fetch(r.port, post())
        assert got.startswith(b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 10\r\n")
        assert got.endswith(b"\r\n\r\noverloaded")
        assert r.upstreams[0].idle_connections == 1


@pytest.mark.parametrize("body", [b"Content-Length: 90000\r\n\r\n" + b"x" * 90_000, b"\r\nslow"])
async def test_an_error_reply_too_long_or_too_slow_is_not_kept(body: bytes) -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 500 Oh\r\n" + body)
        await call.reader.read()

    limits = RelayLimits(held_bytes=1000, held_s=0.05)
    async with worker(script) as w, relay(w.port, limits=limits) as r:
        assert b" 502 " in await fetch(r.port, post())
        assert kind(r.outcomes[0].error) == "status_5xx"
        assert r.outcomes[0].held is None
        await until(lambda: w.gone == 1, "the worker's connection is closed")


async def test_an_early_refusal_of_a_large_body_reaches_the_client() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")  # the body stays unread
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await until(lambda: bool(r.outcomes), "the relay has its answer")
        writer.transport.abort()

    server = await asyncio.start_server(script, "127.0.0.1", 0, limit=1024)
    async with server, relay(server.sockets[0].getsockname()[1]) as r:
        got = await fetch(r.port, post(b"x" * (1 << 25)))
        assert got.startswith(b"HTTP/1.1 413 Too Large\r\n")
        assert r.upstreams[0].idle_connections == 0, "half a request was sent on it"


async def test_a_large_body_arrives_complete() -> None:
    body = bytes(range(256)) * (1 << 15)

    async with worker(send_ok) as w, relay(w.port) as r:
        assert (await fetch(r.port, post(body))).endswith(b"\r\n\r\nok")
        assert w.calls[0].body == body


@pytest.mark.parametrize("reply", [STREAM + EVENT, b"HTTP/1.1 200 OK\r\n\r\nuntil the end"])
async def test_an_exception_in_the_router_is_raised_and_not_charged_to_the_worker(
    reply: bytes,
) -> None:
    def broken(now_s: float) -> None:
        raise ZeroDivisionError("a bug of ours")

    async def script(call: WorkerCall) -> None:
        await call.send(reply)
        await call.reader.read()

    caught: list[Exception] = []

    async def handle(request: Request) -> Answer:
        client = ClientReply(request)
        sent = upstream_request(request, request.body)
        try:
            await upstream.send(sent, client, Timeouts(), broken)
        except ZeroDivisionError as error:
            caught.append(error)
            raise
        return client

    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with worker(script) as w, served(handle) as port, upstreams_to(w.port) as (upstream,):
        if b"chunked" in reply:
            assert (await fetch(port, post())).endswith(EVENT), "no second reply in the first"
        else:
            with pytest.raises(ConnectionResetError):
                await fetch(port, post())
        assert (len(caught), len(reported)) == (1, 1)
        await until(lambda: upstream.open_connections == 0, "the connection is closed")
