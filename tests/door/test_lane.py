"""What the door serves itself: the same to clients and handlers as with a server behind it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from router.request.errors import ClientError
from router.upstream.client_reply import ClientReply
from router.upstream.reply import Framing, ReplyHead
from tests.door.support import LIMITS, behind, pieces
from tests.door.test_slow import Clock, good, only, opened
from tests.live.hostile.corpus import BODY, head, sized
from tests.router.waiting import until

GET = head(line=b"GET /v1/completions HTTP/1.1")
LAST = sized(b"Connection: close")


def statuses(got: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", got)


SEEN = [
    sized(),
    sized(
        b"X-A: \xe9",
        b"x-a: 2",
        b"Authorization: Bearer k",
        line=b"POST /v1/completions?a=%20 HTTP/1.1",
    ),
    sized(b"Connection: keep-alive", b"Accept:", b"X-Request-Id: \t a b "),
    sized(b"Connection: close"),
]


@pytest.mark.parametrize("data", SEEN)
async def test_handlers_see_the_same_request(data: bytes) -> None:
    seen = []

    async def handle(request: web.Request) -> web.StreamResponse:
        get = request.headers.get
        asked = [get(name) for name in ("x-a", "X-A", "authorization", "Accept", "nobody", "host")]
        assert request.transport is not None
        assert not request.protocol.writing_paused
        line = request.method, request.path, request.raw_path, request.version
        rest = request.raw_headers, request.remote, request.keep_alive, await request.read()
        seen.append((*line, *asked, *rest))
        return web.Response(body=b"!")

    for front in ("aiohttp", "auto"):
        async with behind(handle, front=front) as it:
            await pieces(it.port, data if b"close" in data else data + LAST)
    assert len(seen) == (2 if b"close" in data else 4)
    assert seen[0] == seen[len(seen) // 2]


async def fails(request: web.Request) -> web.StreamResponse:
    raise ClientError(429, "wait a little", "model", "rate", (("Retry-After", "1"),))


async def breaks(request: web.Request) -> web.StreamResponse:
    raise ZeroDivisionError("a defect")


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, body=b"{}", content_type="application/json")


@pytest.mark.parametrize("handle", [fails, breaks, refuses, good])
async def test_answers_of_our_own_are_the_same(handle: Any) -> None:
    answers = []
    for front in ("aiohttp", "auto"):
        async with behind(handle, front=front) as it:
            got = await pieces(it.port, sized() + LAST)
        lines = [sorted(part.lower().split(b"\r\n")) for part in got.split(b"HTTP/1.1 ")[1:]]
        answers.append(
            [[line for line in part if not line.startswith(b"date: ")] for part in lines]
        )
        assert got.count(b"\r\nDate: ") == 2
        assert b"server:" not in got.lower()
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]


async def test_what_is_not_hot_goes_to_the_server_with_all_that_follows() -> None:
    fronts: list[bool] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        fronts.append(isinstance(request, web.Request))
        await asyncio.sleep(0)
        return web.Response(body=await request.read())

    async with behind(handle, front="auto") as it:
        got = await pieces(it.port, sized() + sized() + GET + sized() + LAST)
    assert statuses(got) == [b"200"] * 5
    assert fronts == [False, False, True, True, True]


@pytest.mark.parametrize("cut", [1, 30, 100, 140])
async def test_half_a_request_is_nobodys_until_it_is_whole(cut: int) -> None:
    async with behind(good, front="auto") as it:
        reader, writer = await opened(it.port)
        data = sized() + GET + sized()
        for at in range(0, len(data), cut):
            writer.write(data[at : at + cut])
            await asyncio.sleep(0)
        await reader.readuntil(BODY)
        assert await reader.readuntil(BODY)
        writer.close()


async def test_pipelined_requests_are_held_up_and_all_answered_in_order() -> None:
    gate = asyncio.Event()
    begun: list[bytes] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        begun.append(await request.read())
        await gate.wait()
        return web.Response(body=begun[-1] + b";")

    bodies = [b"%04d" % number for number in range(3000)]
    async with behind(handle, front="auto") as it:
        reader, writer = await opened(it.port)
        for body in bodies:
            writer.write(head(b"Content-Length: 4") + body)
        connection = await only(it)
        await until(lambda: connection._lane._held_up, "no more is read")
        assert len(begun) == 1
        gate.set()
        for body in bodies:
            assert (await reader.readuntil(b";")).endswith(b"\r\n\r\n" + body + b";")
        assert not connection._lane._held_up
        writer.close()


async def test_idle_connections_are_closed() -> None:
    clock = Clock()
    async with behind(good, clock=clock, front="auto", keep_alive_s=10.0) as it:
        reader, writer = await opened(it.port)
        for _ in range(2):
            clock.now_s += 9.0
            it.door.look()
            writer.write(sized())
            await reader.readuntil(BODY)
        clock.now_s += 9.0
        writer.write(sized()[:-1])
        connection = await only(it)
        await until(lambda: connection._reader.in_body, "half a request")
        clock.now_s += 9.0
        it.door.look()
        writer.write(sized()[-1:])
        await reader.readuntil(BODY)
        clock.now_s += 11.0
        it.door.look()
        assert await reader.read() == b""
        assert not it.door.refusals
        writer.close()


async def test_a_client_that_reads_nothing_holds_up_whoever_comes_after() -> None:
    """A hand-over while the client has yet to read: the server must know."""

    async def much(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * (8 << 20))

    async with behind(much, front="auto") as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
        writer.write(sized())
        connection = await only(it)
        await until(lambda: connection._lane.writing_paused, "the client is slow")
        writer.write(GET)
        await until(lambda: connection._server is not None, "the server has it")
        assert connection._server.writing_paused
        writer.write(head(b"Connection: close", line=b"GET /v1/completions HTTP/1.1"))
        got = await reader.read()
        assert got.count(b"HTTP/1.1 200") == 3
        assert got.count(b"x") >= 3 * (8 << 20)
        writer.close()


async def test_an_answer_into_the_midst_of_another_ends_the_connection() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        reply = ClientReply(request)
        reply.head(ReplyHead(200, b"OK", ((b"Content-Length", b"9"),), Framing.LENGTH, 9))
        reply.data(b"half")
        return web.Response(text="nonsense")

    async with behind(handle, front="auto") as it:
        got = await pieces(it.port, sized() + sized())
    assert b"nonsense" not in got
    assert len(statuses(got)) <= 1


async def test_limits_hold_in_the_lane() -> None:
    assert LIMITS.body_bytes < 1 << 21
    async with behind(good, front="auto") as it:
        big = head(b"Content-Length: %d" % (1 << 21)) + b"x" * (1 << 21)
        got = await pieces(it.port, sized() + big)
        assert statuses(got) == [b"200", b"413"]


async def test_the_lanes_idle_time_is_no_business_of_the_server_behind() -> None:
    clock = Clock()
    async with behind(good, clock=clock, front="auto", keep_alive_s=10.0) as it:
        reader, writer = await opened(it.port)
        writer.write(sized())
        await reader.readuntil(BODY)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        clock.now_s += 11.0
        it.door.look()
        writer.write(LAST)
        assert statuses(await reader.read()) == [b"200"]
        writer.close()
