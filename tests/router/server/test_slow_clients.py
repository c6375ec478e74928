"""Tests of clients that are slow and of connections beyond the limits: they are closed in time and
counted, and no other client suffers.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from ipaddress import ip_network

import pytest

from router.http.messages import Answer, Request, Response
from tests.live.hostile.corpus import BODY, coded, head, sized
from tests.router.server.clients import Clock, connect, echo_body, only_connection
from tests.router.server_support import LIMITS, pieces, serving
from tests.router.waiting import until

HALF = {
    "nothing": (b"", "silent", b""),
    "half a line": (b"POST /v1/compl", "late_head", b" 408 "),
    "half a head": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A", "late_head", b" 408 "),
    "no body": (head(b"Content-Length: 5"), "late_body", b" 408 "),
    "half a body": (sized()[:-5], "late_body", b" 408 "),
    "half a chunk": (coded(b"5\r\nab"), "late_body", b" 408 "),
}


@pytest.mark.parametrize("what", HALF)
@pytest.mark.parametrize("before", [b"", sized()])
async def test_a_request_must_be_complete_in_time(what: str, before: bytes) -> None:
    part, reason, status = HALF[what]
    clock = Clock()
    async with serving(echo_body, clock=clock, head_s=10.0, body_s=20.0) as it:
        reader, writer = await connect(it.port)
        writer.write(before + part)
        if before:
            await reader.readuntil(BODY)
        connection = await only_connection(it)
        await until(lambda: connection._reader.requests == bool(before), "the first request")
        await until(
            lambda: bool(connection._reader.held_bytes or connection._reader.in_body) or not part,
            "the part",
        )
        if before and not part:
            clock.now_s += 70.0
            it.server.look()
            assert not it.server.refusals
            writer.close()
            return
        clock.now_s += 20.0 if reason == "late_body" else 10.0
        clock.now_s -= 0.01
        it.server.look()
        assert not it.server.refusals
        clock.now_s += 0.02
        it.server.look()
        assert not it.server.refusals  # bytes that have arrived by now are read first
        it.server.look()
        rest = await asyncio.wait_for(reader.read(), 10)
        assert status in rest
        assert it.server.refusals == {reason: 1}
        writer.close()
        await until(lambda: it.server.connections == 0, "the connection is gone")
        assert it.server.held_bytes == 0


async def test_slow_single_bytes_do_not_extend_the_head_timeout() -> None:
    clock = Clock()
    async with serving(echo_body, clock=clock, head_s=10.0) as it:
        reader, writer = await connect(it.port)
        connection = await only_connection(it)
        for count in range(1, 12):
            writer.write(b"POST /v1/completions"[count - 1 : count])
            if not it.server.refusals:
                await until(lambda c=count: connection._reader.held_bytes >= c, "a byte")
            clock.now_s += 1.0
            it.server.look()
        assert it.server.refusals == {"late_head": 1}
        assert b" 408 " in await reader.read()
        writer.close()


DRIPPING = {
    "extensions": coded(b"5;" + b"x" * 200),
    "a chunk": coded(b"5\r\nabcd"),
    "trailers": coded(b"0\r\n" + b"a: b\r\n" * 100),
    "a body": head(b"Content-Length: 500") + b"x" * 200,
    "a body that is refused": head(b"Content-Length: 2000000") + b"x" * 200,
}


@pytest.mark.parametrize("what", DRIPPING)
async def test_a_slow_body_does_not_extend_the_body_timeout(what: str) -> None:
    data, clock = DRIPPING[what], Clock()
    async with serving(echo_body, clock=clock, head_s=10.0, body_s=20.0) as it:
        reader, writer = await connect(it.port)
        connection = await only_connection(it)
        begun = data.index(b"\r\n\r\n") + 4
        writer.write(data[:10])
        await until(lambda: connection._reader.in_head, "the head begins")
        clock.now_s += 5.0
        writer.write(data[10:begun])
        await until(lambda: connection._reader.in_body, "the body begins")
        for number in range(12):
            clock.now_s += 1.9
            it.server.look()
            assert bool(it.server.refusals) == (number >= 11)
            if number < 3:
                writer.write(data[begun + number : begun + number + 1])
                await until(
                    lambda n=number: (
                        connection._reader._raw_bytes > n
                        or not connection._reader.in_body
                        or bool(it.server.refusals)
                        or bool(connection._reader._chunks)
                    ),
                    "a byte",
                )
        assert it.server.refusals == {"late_body": 1}
        assert b" 408 " in await reader.read()
        writer.close()


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    clock = Clock()

    async def answer_64_mib(request: Request) -> Answer:
        return Response(200, b"x" * (64 << 20))

    async with serving(answer_64_mib, clock=clock, client_s=30.0) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
        writer.write(sized())
        connection = await only_connection(it)
        await until(lambda: connection._write_by_s == 130.0, "the server waits for the client")
        clock.now_s = 131.0
        it.server.look()
        assert it.server.refusals == {"slow_reader": 1}
        await until(lambda: it.server.connections == 0, "the connection is gone")
        writer.close()


async def test_connections_above_the_limit_are_refused() -> None:
    async with serving(echo_body, connections=2) as it:
        first, second = await connect(it.port), await connect(it.port)
        await until(lambda: it.server.connections == 2, "two connections")
        reply = await pieces(it.port)
        assert b" 503 " in reply
        assert b"too_many_connections" in reply
        for reader, writer in (first, second):
            writer.write(sized())
            assert b" 200 " in await reader.readuntil(BODY)
        first[1].close()
        await until(lambda: it.server.connections == 1, "one connection")
        assert b" 200 " in await pieces(it.port, sized(b"Connection: close"))
        second[1].close()


async def test_connections_above_the_limit_per_address_are_refused() -> None:
    async with serving(echo_body, connections_per_address=1) as it:
        _, writer = await connect(it.port)
        await until(lambda: it.server.connections == 1, "a connection")
        assert b"too_many_of_address" in await pieces(it.port)
        other = socket.socket()
        other.bind(("127.0.0.2", 0))
        other.setblocking(False)
        await asyncio.get_running_loop().sock_connect(other, ("127.0.0.1", it.port))
        reader, elsewhere = await asyncio.open_connection(sock=other)
        elsewhere.write(sized())
        assert b" 200 " in await reader.readuntil(BODY)
        elsewhere.close()
        writer.close()
        await until(lambda: it.server.connections == 0, "all are gone")
        assert not it.server._of_address


async def test_the_total_size_of_arriving_bodies_is_bounded() -> None:
    async with serving(echo_body, held_bytes=100_000) as it:
        big = head(b"Content-Length: 80000") + b"x" * 60_000
        reader, writer = await connect(it.port)
        writer.write(big)
        await until(lambda: it.server.held_bytes == 60_000, "the first body arrives")
        reply = await pieces(it.port, big)
        assert b" 503 " in reply
        assert b"bodies_full" in reply
        writer.write(b"x" * 20_000)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await until(lambda: it.server.connections == 0, "all are gone")
        assert it.server.held_bytes == 0


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("times", [2, 20])
async def test_a_too_large_body_is_refused_and_not_kept(framing: str, times: int) -> None:
    limits = replace(LIMITS, body_bytes=1000)
    body = b"x" * 1000 * times
    data = head(b"Content-Length: %d" % len(body)) + body
    if framing == "chunks":
        data = coded(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    async with serving(echo_body, limits) as it:
        reply = await pieces(it.port, data)
        assert b" 413 " in reply
        assert b"1000 bytes" in reply
        assert it.server.refusals == {"body_too_large": 1}
        assert it.server.held_bytes == 0


async def test_expect_100_continue_gets_the_100_or_the_refusal() -> None:
    limits = replace(LIMITS, body_bytes=1000)
    async with serving(echo_body, limits) as it:
        reader, writer = await connect(it.port)
        for _ in range(2):
            writer.write(head(b"Content-Length: 3", b"Expect: 100-continue"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert b" 200 " in await reader.readuntil(b"abc")
        writer.write(head(b"Transfer-Encoding: chunked", b"Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"3\r\nabc\r\n0\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"abc")
        writer.write(head(b"Content-Length: 3000", b"Expect: 100-continue"))
        assert (await reader.read()).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_100_continue_is_never_sent_within_another_answer() -> None:
    release = asyncio.Event()

    async def answer_late(request: Request) -> Answer:
        if not release.is_set():
            await release.wait()
        return Response(200, request.body)

    async with serving(answer_late) as it:
        reader, writer = await connect(it.port)
        writer.write(sized() + head(b"Content-Length: 3", b"Expect: 100-continue"))
        connection = await only_connection(it)
        await until(lambda: connection._reader.in_body, "the second head")
        release.set()
        await reader.readuntil(BODY)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        second = await reader.readuntil(b"\r\n\r\nabc")
        assert second.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_refusal_waits_for_the_answers_before_it() -> None:
    release = asyncio.Event()

    async def answer_late(request: Request) -> Answer:
        await release.wait()
        return Response(200, request.body)

    async with serving(answer_late) as it:
        reader, writer = await connect(it.port)
        writer.write(sized() + sized() + b"nonsense\r\n\r\n")
        await until(lambda: bool(it.server.refusals), "the refusal")
        release.set()
        got = await reader.read()
        assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]
        writer.close()


WRONG = b"GET / HTTP/9.9\r\n\r\n"


async def send_invalid_requests(port: int, count: int) -> None:
    for _ in range(count):
        assert b" 400 " in await pieces(port, WRONG)


async def test_a_hostile_address_is_deferred_until_its_requests_are_valid() -> None:
    async with serving(echo_body) as it:
        await send_invalid_requests(it.port, 3)
        assert it.server.deferred == 2  # the first connection was not known as hostile
        for deferred in range(3, 3 + 3 * 4):  # each refusal weighs as much as four right ones
            assert b" 200 " in await pieces(it.port, sized(b"Connection: close"))
            assert it.server.deferred == deferred
        assert b" 200 " in await pieces(it.port, sized(b"Connection: close"))
        assert it.server.deferred == 14
        assert it.server.held_bytes == 0


async def test_an_address_with_mostly_valid_requests_is_not_deferred() -> None:
    async with serving(echo_body) as it:
        for _ in range(3):
            await send_invalid_requests(it.port, 1)
            reader, writer = await connect(it.port)
            for _ in range(4):
                writer.write(sized())
                await reader.readuntil(BODY)
            writer.close()
        assert it.server.deferred == 3  # those after a refusal


async def test_hostile_addresses_are_forgotten() -> None:
    async with serving(echo_body) as it:
        await send_invalid_requests(it.port, 100)
        for _ in range(64):
            it.server.look()
        deferred = it.server.deferred
        await send_invalid_requests(it.port, 1)
        assert it.server.deferred == deferred


async def test_trusted_peers_are_never_deferred() -> None:
    async with serving(echo_body, trusted=(ip_network("127.0.0.0/8"),)) as it:
        await send_invalid_requests(it.port, 3)
        assert it.server.deferred == 0


async def test_a_client_queued_behind_others_may_disconnect_or_keep_sending() -> None:
    async with serving(echo_body) as it:
        await send_invalid_requests(it.port, 1)
        reader, writer = await connect(it.port)
        _, leaving = await connect(it.port)
        half = len(sized()) // 2
        leaving.write(sized()[:half])
        writer.write(sized()[:half])
        await until(lambda: it.server.deferred == 2, "both to wait")
        leaving.transport.abort()
        writer.write(sized()[half:])
        await reader.readuntil(BODY)
        writer.close()
        await until(lambda: it.server.connections == 0, "both to end")
        assert it.server.held_bytes == 0
