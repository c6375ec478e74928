"""Tests of the relay's client side: kept connections, slow clients and clients that disappear."""

from __future__ import annotations

import asyncio

import pytest

from router.http.messages import Answer, Request, Response
from router.http.reply import Framing, ReplyHead
from router.upstream.client_reply import ClientReply, upstream_request
from tests.router.relay_support import (
    EVENT,
    STREAM,
    WorkerCall,
    fetch,
    header,
    post,
    read_reply,
    relay,
    served,
    until,
    worker,
)

pytestmark = pytest.mark.usefixtures("every_path")


async def echo(call: WorkerCall) -> None:
    """Reply with the request's own body: chunked if its length is even, with a Content-Length if
    odd.
    """
    if len(call.body) % 2:
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(call.body) + call.body
        )
    else:
        raw = b"%x\r\n%s\r\n0\r\n\r\n" % (len(call.body), call.body)
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)


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


async def test_a_chunked_request_is_sent_to_the_worker_with_a_length() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n3;e=f\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert (await fetch(r.port, request)).endswith(b"\r\n\r\nabcde")
        assert header(w.calls[0].head, b"transfer-encoding") is None
        assert header(w.calls[0].head, b"content-length") == b"5"


async def test_expect_100_continue_is_answered_by_the_router() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        head = post(b"abc", b"Expect: 100-continue")[:-3]
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.read()).endswith(b"\r\n\r\nabc")
        assert header(w.calls[0].head, b"expect") is None
        writer.close()


async def test_a_compressed_body_is_forwarded_unchanged() -> None:
    body = b"\x1f\x8b no gzip at all"
    async with worker(echo) as w, relay(w.port) as r:
        got = await fetch(r.port, post(body, b"Content-Encoding: gzip"))
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
        assert b" 200 " in await fetch(r.port, request)
        assert w.calls[0].head.startswith(b"POST /v1/completions?x=1 HTTP/1.1\r\n")


@pytest.mark.parametrize("after", ["before the reply", "after the head", "in the stream"])
async def test_a_client_that_leaves_frees_the_worker_immediately(after: str) -> None:
    async def script(call: WorkerCall) -> None:
        if after != "before the reply":
            await call.send(STREAM)
        if after == "in the stream":
            await call.send(EVENT)
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


async def test_a_client_that_leaves_while_connecting_leaks_no_connection() -> None:
    async with worker(echo) as w, relay(w.port) as r:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(post(close=False))
            await asyncio.sleep(0)
            writer.transport.abort()
        assert (await fetch(r.port, post(b"abc"))).endswith(b"abc")
        idle = r.upstreams[0]
        await until(lambda: idle.open_connections == idle.idle_connections, "all are idle")


async def test_a_handler_that_fails_after_a_reply_sends_no_more_bytes() -> None:
    async def handle(request: Request) -> Answer:
        reply = ClientReply(request)
        reply.head(ReplyHead(200, b"OK", ((b"Content-Length", b"2"),), Framing.LENGTH, 2))
        reply.data(b"ok")
        reply.finish()
        raise ZeroDivisionError("a bug of ours")

    async with served(handle) as port:
        got = await fetch(port, post(close=False))
    assert got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_the_upstream_request_equals_the_clients() -> None:
    taken = []

    async def handle(request: Request) -> Answer:
        taken.append(upstream_request(request, request.body, ((b"x-ours", b"1"),)))
        return Response(200)

    async with served(handle) as port:
        await fetch(port, post(b"ab", b"X-A: 1", b"x-a: \xe9"))
    (request,) = taken
    assert (request.method, request.target, request.body) == ("POST", "/v1/completions?x=1", b"ab")
    assert (b"X-A", b"1") in request.headers
    assert (b"x-a", b"\xe9") in request.headers
    assert request.internal_headers == ((b"x-ours", b"1"),)
