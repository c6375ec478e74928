"""Tests of one connection: what handlers see of its requests, and the order and form of the
replies.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from router.http.errors import ClientError
from router.http.messages import Answer, Request, Response
from router.http.reply import Framing, ReplyHead
from router.upstream.client_reply import ClientReply
from tests.live.hostile.corpus import BODY, coded, head, sized
from tests.router.server.clients import Clock, connect, echo_body, only_connection, statuses
from tests.router.server_support import LIMITS, pieces, serving
from tests.router.waiting import until

GET = head(line=b"GET /v1/completions HTTP/1.1")
LAST = sized(b"Connection: close")


LINE = b"POST /v1/completions HTTP/1.1"
SEEN = {
    "plain": sized(b"X-A: \xe9", b"x-a: 2", b"Accept:", b"Connection: close"),
    "a query": sized(b"Connection: close", line=b"POST /v1/completions?a=%20&b HTTP/1.1"),
    "an escape": sized(b"Connection: close", line=b"POST /v1/%63ompletions HTTP/1.1"),
    "absolute": sized(b"Connection: close", line=b"POST http://h:1/v1/completions HTTP/1.1"),
    "HTTP/1.0": sized(line=b"POST /v1/completions HTTP/1.0"),
    "chunks": coded(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), b"Connection: close"),
}


@pytest.mark.parametrize("how", SEEN)
async def test_handlers_get_the_request_unchanged(how: str) -> None:
    seen: list[Request] = []

    async def handle(request: Request) -> Answer:
        seen.append(request)
        assert request.connection.transport is not None
        assert not request.keep_alive
        return Response(200, b"!")

    data = SEEN[how]
    async with serving(handle) as it:
        assert statuses(await pieces(it.port, data)) == [b"200"]
    (request,) = seen
    assert (request.method, request.path, request.body) == ("POST", "/v1/completions", BODY)
    assert request.target == data.split(b" ")[1].decode()
    assert request.query == ({"a": " ", "b": ""} if how == "a query" else {})
    assert request.remote == "127.0.0.1"
    assert request.http_1_0 == (how == "HTTP/1.0")
    assert request.headers.get("HOST") == "x"
    assert request.headers.get("nobody") is None
    if how == "plain":
        assert request.headers.get("x-a") == "\udce9"
        assert request.headers.get("accept") == ""
        assert [value for name, value in request.fields if name in (b"X-A", b"x-a")] == [
            b"\xe9",
            b"2",
        ]


async def fails(request: Request) -> Answer:
    raise ClientError(429, "wait a little", "model", "rate", (("Retry-After", "1"),))


async def breaks(request: Request) -> Answer:
    raise ZeroDivisionError("a defect")


async def refuses(request: Request) -> Answer:
    return Response(503, b"{}", {"Retry-After": "2"})


@pytest.mark.parametrize(
    ("handle", "status", "retry"), [(fails, 429, b"1"), (breaks, 500, None), (refuses, 503, b"2")]
)
async def test_the_routers_own_answers_have_length_type_and_date(
    handle, status: int, retry: bytes | None
) -> None:
    async with serving(handle) as it:
        got = await pieces(it.port, sized() + LAST)
    assert statuses(got) == [b"%d" % status] * 2
    first, second = (part.partition(b"\r\n\r\n") for part in got.split(b"HTTP/1.1 ")[1:])
    for text, _, body in (first, second):
        assert b"\r\nContent-Length: %d" % len(body) in text
        assert b"\r\nContent-Type: application/json" in text
        assert b"\r\nDate: " in text
        assert b"server:" not in text.lower()
        assert (b"\r\nRetry-After: %b" % (retry or b"")) in text or retry is None
        assert "error" in json.loads(body) or handle is refuses
    assert b"Connection" not in first[0]
    assert second[0].endswith(b"\r\nConnection: close")


async def test_other_requests_are_answered_between_inference_requests() -> None:
    async with serving(echo_body, paths=("/other",)) as it:
        asked = (b"GET /health", b"HEAD /v1/models", b"GET /v1/models/tiny", b"GET /v1/models/no")
        lines = [*asked, b"DELETE /ready", b"GET /v1/completions", b"GET /nothing", b"GET /ready"]
        requests = [head(line=line + b" HTTP/1.1") for line in lines]
        got = await pieces(it.port, sized() + b"".join(requests) + LAST)
    assert statuses(got) == [b"%d" % n for n in (200, 200, 200, 200, 404, 405, 405, 404, 503, 200)]
    answers = got.split(b"HTTP/1.1 ")[1:]
    assert answers[2].endswith(b"\r\n\r\n"), "HEAD has no body"
    assert b"Content-Length: 0" not in answers[2]
    assert b"\r\nAllow: GET,HEAD\r\n" in answers[5]
    assert b"\r\nAllow: POST\r\n" in answers[6]
    assert b"is not served at the client port" in answers[7]


async def test_an_http_1_0_client_may_request_keep_alive() -> None:
    line = b"POST /v1/completions HTTP/1.0"
    async with serving(echo_body) as it:
        got = await pieces(it.port, sized(b"Connection: keep-alive", line=line) + sized(line=line))
    assert statuses(got) == [b"200", b"200"]
    assert got.count(b"\r\nConnection: keep-alive\r\n") == 1
    assert got.count(b"\r\nConnection: close\r\n") == 1


@pytest.mark.parametrize("cut", [1, 30, 100, 140])
async def test_a_request_is_handled_only_when_it_is_complete(cut: int) -> None:
    async with serving(echo_body) as it:
        reader, writer = await connect(it.port)
        data = sized() + GET + sized()
        for at in range(0, len(data), cut):
            writer.write(data[at : at + cut])
            await asyncio.sleep(0)
        await reader.readuntil(BODY)
        assert await reader.readuntil(BODY)
        writer.close()


async def test_pipelined_requests_are_paused_and_answered_in_order() -> None:
    gate = asyncio.Event()
    begun: list[bytes] = []

    async def handle(request: Request) -> Answer:
        begun.append(request.body)
        await gate.wait()
        return Response(200, begun[-1] + b";")

    bodies = [b"%04d" % number for number in range(3000)]
    async with serving(handle) as it:
        reader, writer = await connect(it.port)
        for body in bodies:
            writer.write(head(b"Content-Length: 4") + body)
        connection = await only_connection(it)
        await until(lambda: connection._held_up, "no more is read")
        assert len(begun) == 1
        gate.set()
        for body in bodies:
            assert (await reader.readuntil(b";")).endswith(b"\r\n\r\n" + body + b";")
        assert not connection._held_up
        writer.close()


async def test_idle_connections_are_closed() -> None:
    clock = Clock()
    async with serving(echo_body, clock=clock, keep_alive_s=10.0) as it:
        reader, writer = await connect(it.port)
        for _ in range(2):
            clock.now_s += 9.0
            it.server.look()
            writer.write(sized())
            await reader.readuntil(BODY)
        clock.now_s += 9.0
        writer.write(sized()[:-1])
        connection = await only_connection(it)
        await until(lambda: connection._reader.in_body, "half a request")
        clock.now_s += 9.0
        it.server.look()
        writer.write(sized()[-1:])
        await reader.readuntil(BODY)
        clock.now_s += 11.0
        it.server.look()
        assert await reader.read() == b""
        assert not it.server.refusals
        writer.close()


async def test_an_answer_within_another_one_closes_the_connection() -> None:
    async def handle(request: Request) -> Answer:
        reply = ClientReply(request)
        reply.head(ReplyHead(200, b"OK", ((b"Content-Length", b"9"),), Framing.LENGTH, 9))
        reply.data(b"half")
        return Response(200, b"nonsense")

    async with serving(handle) as it:
        got = await pieces(it.port, sized() + sized())
    assert b"nonsense" not in got
    assert len(statuses(got)) <= 1


async def test_limits_apply_to_each_request_of_a_connection() -> None:
    assert LIMITS.body_bytes < 1 << 21
    async with serving(echo_body) as it:
        big = head(b"Content-Length: %d" % (1 << 21)) + b"x" * (1 << 21)
        got = await pieces(it.port, sized() + big)
        assert statuses(got) == [b"200", b"413"]
