"""Tests of replies through real sockets: bytes arrive unchanged in both directions, however workers
frame and split them.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from router.http.reply import Outcome, RelayLimits, Timeouts, Usage
from tests.router.relay_support import (
    WorkerCall,
    chunked,
    fetch,
    header,
    post,
    read_reply,
    relay,
    until,
    worker,
)

pytestmark = pytest.mark.usefixtures("every_path")


async def once(reply: bytes, request: bytes, close: bool = False) -> tuple[bytes, Outcome, bytes]:
    """Relay one request; return the client's bytes, the outcome, and the request head that the
    worker got.
    """

    async def script(call: WorkerCall) -> None:
        await call.send(reply)
        if close:
            call.hang_up()

    async with worker(script) as w, relay(w.port) as r:
        got = await fetch(r.port, request)
        return got, r.outcomes[0], w.calls[0].head


async def test_body_and_headers_pass_unchanged_both_ways() -> None:
    body = b'{"unknown": [1,  2],\n"e": "\xc3\xa9\\u00e9"}' + b"\x00\xff"
    reply = (
        b"HTTP/1.1 200 Fine By Me\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-CaSe: \xe9\r\n"
        b"Content-Length: 7\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive, x-hop\r\n"
        b"X-Hop: 1\r\n\r\n\x00\r\n\r\n\xff."
    )
    seen: list[WorkerCall] = []

    async def script(call: WorkerCall) -> None:
        seen.append(call)
        await call.send(reply)

    async with worker(script) as w, relay(w.port) as r:
        got = await fetch(r.port, post(body, b"Authorization: Bearer k", b"X-A: 1", b"x-a: 2"))
    assert got == (
        b"HTTP/1.1 200 Fine By Me\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-CaSe: \xe9\r\n"
        b"Content-Length: 7\r\nX-Warmroute-Worker: w\r\nConnection: close\r\n\r\n\x00\r\n\r\n\xff."
    )
    assert seen[0].body == body
    assert seen[0].head == (
        b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer k\r\n"
        b"X-A: 1\r\nx-a: 2\r\nContent-Length: %d\r\n\r\n" % (w.port, len(body))
    )


async def test_router_headers_in_a_workers_reply_are_dropped() -> None:
    lies = b"X-Warmroute-Worker: other\r\nx-warmroute-explain: {}\r\nX-Warmroute: 1\r\n"
    head = b"HTTP/1.1 200 OK\r\n" + lies
    got, _, _ = await once(head + b"Content-Length: 2\r\n\r\nok", post())
    ours = b"HTTP/1.1 200 OK\r\nX-Warmroute: 1\r\nContent-Length: 2\r\nX-Warmroute-Worker: w\r\n"
    assert got == ours + b"Connection: close\r\n\r\nok"


async def test_a_stream_is_relayed_unchanged_and_counted() -> None:
    raw = chunked(
        b'data: {"a":1}\n\n',
        b'data: {"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n',
        b"data: [DONE]\n\n",
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    got, outcome, _ = await once(head + b"Transfer-Encoding: chunked\r\n\r\n" + raw, post())
    assert got.endswith(b"\r\n\r\n" + raw)
    assert outcome.error is None
    assert outcome.events == 3
    assert outcome.usage == Usage(5, 1, None)
    assert outcome.bytes_to_client == len(raw)
    assert outcome.first_byte_s is not None
    assert outcome.started_s <= outcome.first_byte_s


async def test_an_http_1_0_client_gets_no_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    got, outcome, _ = await once(
        head + b"3;x=y\r\nabc\r\n5\r\n0\r\n\r\n\r\n0\r\nTrailer: x\r\n\r\n", post(version=b"1.0")
    )
    assert got == (
        b"HTTP/1.1 200 OK\r\nX-Warmroute-Worker: w\r\nConnection: close\r\n\r\nabc0\r\n\r\n"
    )
    assert outcome.error is None


async def test_a_reply_framed_by_close_closes_the_clients_connection() -> None:
    request = post(close=False)  # the client would keep its connection
    got, outcome, _ = await once(b"HTTP/1.1 200 OK\r\n\r\nuntil the end", request, close=True)
    assert got.endswith(b"Connection: close\r\n\r\nuntil the end")
    assert outcome.error is None
    got, outcome, _ = await once(b"HTTP/1.0 200 OK\r\n\r\n", request, close=True)
    assert got.endswith(b"Connection: close\r\n\r\n")
    assert outcome.error is None


@pytest.mark.parametrize(
    ("status", "extra", "method"),
    [
        (b"204 No Content", b"", b"POST"),
        (b"204 No Content", b"Content-Length: 0\r\n", b"POST"),
        (b"304 Not Modified", b"ETag: x\r\n", b"GET"),
        (b"200 OK", b"Content-Length: 1234\r\n", b"HEAD"),
        (b"200 OK", b"Content-Length: 0\r\n", b"POST"),
    ],
)
async def test_replies_without_a_body_pass_through(
    status: bytes, extra: bytes, method: bytes
) -> None:
    request = post().replace(b"POST", method, 1)
    got, outcome, _ = await once(b"HTTP/1.1 " + status + b"\r\n" + extra + b"\r\n", request)
    assert got.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert got.endswith(b"\r\n\r\n")
    assert (b"Content-Length" in got) == (b"Content-Length" in extra and status[:3] != b"204")
    assert (outcome.error, outcome.first_byte_s) == (None, None)


async def test_informational_replies_are_skipped() -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    got, outcome, _ = await once(hints + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", post())
    assert got.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n")
    assert (outcome.status, outcome.error) == (200, None)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_a_4xx_passes_through_and_is_not_charged_to_the_worker(status: int) -> None:
    reply = b"HTTP/1.1 %d No\r\nContent-Length: 3\r\nRetry-After: 2\r\n\r\nbad" % status

    async def script(call: WorkerCall) -> None:
        await call.send(reply)

    async with worker(script) as w, relay(w.port) as r:
        got = await fetch(r.port, post())
        outcome = r.outcomes[0]
        assert not r.first_bytes_s, "a refusal is no first token: it says nothing of speed"
    assert got.startswith(b"HTTP/1.1 %d No\r\n" % status)
    assert b"Retry-After: 2\r\n" in got
    assert got.endswith(b"\r\n\r\nbad")
    assert (outcome.status, outcome.error, outcome.retryable) == (status, None, False)
    assert not outcome.answers


async def test_extra_bytes_after_a_reply_only_close_its_connection() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n")

    async with worker(script) as w, relay(w.port) as r:
        for _ in range(3):
            assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
        assert w.connections == 3


async def test_an_unsolicited_reply_closes_an_idle_connection() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with worker(script) as w, relay(w.port) as r:
        await fetch(r.port, post())
        await w.calls[0].send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await until(lambda: r.upstreams[0].open_connections == 0, "the connection is closed")
        assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")


async def test_progress_is_reported_at_most_as_often_as_configured() -> None:
    go = asyncio.Event()

    async def script(call: WorkerCall) -> None:
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for i in range(20):
            await call.send(b"9\r\ndata: %d\n\n\r\n" % (i % 10))
            await asyncio.sleep(0)
        await go.wait()
        await call.send(b"0\r\n\r\n")

    async with worker(script) as w, relay(w.port, limits=RelayLimits(progress_s=3600.0)) as r:
        task = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: bool(r.first_bytes_s), "the first byte is told before the end")
        assert not r.outcomes
        go.set()
        await task
        assert len(r.progress) == 1
        assert r.outcomes[0].events == 20


async def test_many_requests_cut_at_random_places_arrive_unchanged() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    bodies: dict[bytes, bytes] = {}

    def framed(body: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\nX-Pad: %s\r\n" % (b"p" * dice.randrange(60))
        if dice.random() < 0.4:
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        raw = b""
        while body:
            size = dice.randint(1, len(body))
            extension = dice.choice([b"", b";a=b", b' ; q="0"'])
            raw += b"%x%s\r\n%s\r\n" % (size, extension, body[:size])
            body = body[size:]
        trailer = dice.choice([b"", b"X-T: 1\r\n"])
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + raw + b"0\r\n" + trailer + b"\r\n"

    async def script(call: WorkerCall) -> None:
        reply = framed(bodies[call.body])
        await call.send_in_pieces(
            reply, sorted(dice.randrange(len(reply)) for _ in range(dice.randrange(6)))
        )
        if dice.random() < 0.3:
            call.hang_up()  # without having said so, while the connection lies idle

    async def client(port: int, name: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for turn in range(60):
            key = b"%d-%d" % (name, turn) + b"0\r\n\r\n" * dice.randrange(3)
            bodies[key] = dice.choice([b"0\r\n\r\n", b"\r\n\r\nHTTP/1.1 500 x\r\n\r\n", b"z"]) * (
                dice.randrange(1, 40)
            )
            request = post(key, close=False)
            at = dice.randrange(len(request))
            writer.write(request[:at])
            await asyncio.sleep(0)
            writer.write(request[at:])
            head, body = await read_reply(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n"), f"seed {seed}: {head!r}"
            assert body == bodies[key], f"seed {seed}"
        writer.close()

    async with worker(script) as w, relay(w.port, timeouts=Timeouts(first_byte_s=5.0)) as r:
        async with asyncio.timeout(30):
            await asyncio.gather(*(client(r.port, name) for name in range(8)))
        assert [o.error for o in r.outcomes if o.error] == [], f"seed {seed}"
        assert w.connections < len(w.calls), "connections are kept alive"


async def test_internal_headers_of_a_client_are_dropped() -> None:
    got, _, head = await once(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        post(b"{}", b"X-WARMROUTE-INTERNAL-role: admin", b"X-Warmroute-Explain: 1"),
    )
    assert header(head, b"x-warmroute-internal-role") is None
    assert header(head, b"x-warmroute-explain") == b"1"
    assert got.startswith(b"HTTP/1.1 200")
