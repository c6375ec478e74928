"""The client's side: kept connections, slow and vanishing clients, and what aiohttp may call."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from router.http.client_reply import ClientReply, upstream_request
from router.http.errors import ClientError
from router.http.relay.reply import Framing, RelayLimits, ReplyHead, Timeouts
from tests.router.relay_support import (
    DEADLINE_S,
    WorkerCall,
    ask,
    header,
    post,
    read_reply,
    relay,
    until,
    worker,
)

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: 1\n\n\r\n"


async def echo(call: WorkerCall) -> None:
    """Answer with the request's own body, by turns with a length and chunked."""
    if len(call.body) % 2:
        await call.say(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(call.body) + call.body
        )
    else:
        raw = b"%x\r\n%s\r\n0\r\n\r\n" % (len(call.body), call.body)
        await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)


async def test_pipelined_requests_are_answered_in_order() -> None:
    bodies = [b"%d" % i + b"POST /v1/completions HTTP/1.1\r\n\r\n" * (i % 3) for i in range(40)]
    async with worker(echo) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(b"".join(post(body, close=False) for body in bodies))
        for body in bodies:
            head, got = await read_reply(reader)
            assert got == body
            assert header(head, b"connection") is None
        writer.close()
        assert w.connections == 1


async def test_a_chunked_request_arrives_with_a_length() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n3;e=f\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert (await ask(r.port, request)).endswith(b"\r\n\r\nabcde")
        assert header(w.calls[0].head, b"transfer-encoding") is None
        assert header(w.calls[0].head, b"content-length") == b"5"


async def test_expect_100_continue_is_answered_here() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        head = post(b"abc", b"Expect: 100-continue")[:-3]
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.read()).endswith(b"\r\n\r\nabc")
        assert header(w.calls[0].head, b"expect") is None
        writer.close()


async def test_a_compressed_body_is_forwarded_as_it_came() -> None:
    body = b"\x1f\x8b no gzip at all"
    async with worker(echo) as w, relay(w.port) as r:
        got = await ask(r.port, post(body, b"Content-Encoding: gzip"))
        assert w.calls[0].body == body
        assert header(w.calls[0].head, b"content-encoding") == b"gzip"
        assert got.startswith(b"HTTP/1.1 200")


async def test_an_http_1_0_client_may_keep_its_connection() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        for _ in range(2):
            writer.write(post(b"abc", b"Connection: keep-alive", version=b"1.0", close=False))
            head, body = await read_reply(reader)
            assert header(head, b"connection") == b"keep-alive"
            assert body == b"abc"
        writer.close()


async def test_an_absolute_target_is_made_relative() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        request = post(b"abc").replace(b"/v1/", b"http://public.example/v1/", 1)
        assert b" 200 " in await ask(r.port, request)
        assert w.calls[0].head.startswith(b"POST /v1/completions?x=1 HTTP/1.1\r\n")


@pytest.mark.parametrize("after", ["before the reply", "after the head", "in the stream"])
async def test_a_client_that_leaves_frees_the_worker_at_once(after: str) -> None:
    async def script(call: WorkerCall) -> None:
        if after != "before the reply":
            await call.say(STREAM)
        if after == "in the stream":
            await call.say(EVENT)
        await call.reader.read()

    async with worker(script) as w, relay(w.port) as r:
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(post())
        await until(lambda: len(w.calls) == 1, "the worker has the request")
        if after == "in the stream":
            assert await reader.readuntil(b"\n\n")
        writer.transport.abort()
        await until(lambda: w.gone == 1, "the worker's connection is closed")
        await until(lambda: r.cancelled == 1, "the handler is cancelled")
        assert r.upstreams[0].open_connections == 0
        assert not r.outcomes
        await until(lambda: asyncio.all_tasks() <= before, "no task is left")


async def test_a_client_that_leaves_while_connecting_leaves_nothing() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(post(close=False))
            await asyncio.sleep(0)
            writer.transport.abort()
        assert (await ask(r.port, post(b"abc"))).endswith(b"abc")
        idle = r.upstreams[0]
        await until(lambda: idle.open_connections == idle.idle_connections, "all are idle")


async def test_a_slow_client_pauses_the_worker() -> None:
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    total = 600
    sent = 0

    async def script(call: WorkerCall) -> None:
        nonlocal sent
        await call.say(STREAM)
        for _ in range(total):
            await call.say(chunk)
            sent += 1
        await call.say(b"0\r\n\r\n")

    async with worker(script) as w, relay(w.port, buffer_bytes=65_536) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await until(lambda: bool(r.replies) and r.replies[0].congested, "the client is congested")
        stalled = w.calls[0].writer.transport
        await until(lambda: stalled.get_write_buffer_size() > 65_536, "the worker is held up")
        client = r.replies[0].client_transport
        assert client is not None
        assert client.get_write_buffer_size() < 1_000_000
        assert sent < total
        assert not r.outcomes
        async with asyncio.timeout(DEADLINE_S):
            got = 0
            while data := await reader.read(1 << 20):
                got += len(data)
                assert client.get_write_buffer_size() < 1_000_000
        writer.close()
        assert got > total * 65_536
        assert r.outcomes[0].error is None
        assert r.outcomes[0].bytes_to_client == total * len(chunk) + 5


async def test_a_connection_is_free_again_though_its_client_reads_slowly() -> None:
    """The reply ends in the very read that fills the client's buffer."""
    body = b"x" * 30_000_000
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def script(call: WorkerCall) -> None:
        await call.say(whole)

    async with worker(script) as w, relay(w.port, buffer_bytes=1) as r:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(post())
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.read()).endswith(body)
            writer.close()
        assert w.connections == 1
        for call in w.calls:
            call.hang_up()
        await until(lambda: r.upstreams[0].open_connections == 0, "the end is noticed")


async def test_a_client_that_stops_reading_is_given_up() -> None:
    async def script(call: WorkerCall) -> None:
        await call.say(STREAM)
        while True:
            await call.say(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    async with worker(script) as w, relay(w.port, timeouts=Timeouts(client_s=0.1)) as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await until(lambda: bool(r.outcomes), "the relay gives up")
        error = r.outcomes[0].error
        assert isinstance(error, ClientError)
        assert error.code == "slow_client"
        assert not r.outcomes[0].retryable
        await until(lambda: w.gone == 1, "the worker's connection is closed")
        writer.close()


async def test_a_worker_that_waits_for_a_slow_client_is_not_blamed() -> None:
    async def script(call: WorkerCall) -> None:
        await call.say(STREAM)
        for _ in range(400):
            await call.say(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
        await call.say(b"0\r\n\r\n")

    times = Timeouts(between_s=0.1)
    async with worker(script) as w, relay(w.port, timeouts=times) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await until(lambda: bool(r.replies) and r.replies[0].congested, "the client is congested")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 3 * times.between_s
        await until(lambda: loop.time() > end_s, "the worker's time passes several times over")
        assert not r.outcomes
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(1 << 20):
                pass
        writer.close()
        assert r.outcomes[0].error is None


async def test_a_worker_that_waits_for_both_sides_is_not_stuck() -> None:
    """Request not yet taken, reply not yet read: neither direction waits for the other."""
    body = b"x" * (1 << 24)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM)
        for _ in range(len(body) >> 16):
            writer.write(b"10000\r\n" + await reader.readexactly(65_536) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    limits = RelayLimits(write_bytes=65_536)
    async with server, relay(server.sockets[0].getsockname()[1], limits=limits) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post(body))
        got = 0
        async with asyncio.timeout(DEADLINE_S):
            while data := await reader.read(1 << 16):
                got += len(data)
        writer.close()
        assert got > len(body)
        assert r.outcomes[0].error is None


async def test_aiohttp_calls_only_what_the_reply_relies_on() -> None:
    """A reply that counts what is asked of it, through a whole kept connection."""
    asked: set[str] = set()

    class Watched(ClientReply):
        def __getattribute__(self, name: str) -> object:
            asked.add(name)
            return super().__getattribute__(name)

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = Watched(request)
        head = ReplyHead(200, b"OK", ((b"Content-Length", b"2"),), Framing.LENGTH, 2)
        reply.head(head)
        reply.data(b"ok")
        reply.finish()
        asked.clear()
        return reply

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        got = await ask(runner.addresses[0][1], post(close=False) + post())
    finally:
        await runner.cleanup()
    once = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
    assert got == once + b"\r\nok" + once + b"Connection: close\r\n\r\nok"
    public = {name for name in asked if not name.startswith("_")}
    assert public == {"prepare", "write_eof", "keep_alive"}


async def test_the_request_is_taken_as_it_came() -> None:
    taken = []

    async def handle(request: web.Request) -> web.StreamResponse:
        taken.append(upstream_request(request, await request.read(), ((b"x-ours", b"1"),)))
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await ask(runner.addresses[0][1], post(b"ab", b"X-A: 1", b"x-a: \xe9"))
    finally:
        await runner.cleanup()
    (request,) = taken
    assert (request.method, request.target, request.body) == ("POST", "/v1/completions?x=1", b"ab")
    assert (b"X-A", b"1") in request.headers
    assert (b"x-a", b"\xe9") in request.headers
    assert request.internal_headers == ((b"x-ours", b"1"),)
