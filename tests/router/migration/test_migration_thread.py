"""Tests of streams whose first worker is served by the native relay thread, and which Python
continues after that worker is lost.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from router.upstream.native import NativeRelay, NativeUpstream
from tests.router import relay_support
from tests.router.migration.broken_streams import (
    BODY,
    PROMPT,
    WHOLE,
    body_of,
    dies,
    events_for,
    framed,
    is_incomplete,
    request_bytes,
    serves,
)
from tests.router.migration.migration_engines import Engine
from tests.router.migration.migration_support import TOTAL, Chain, chain
from tests.router.relay_support import STREAM, WorkerCall, chunked, fetch, header
from tests.router.waiting import until

pytestmark = pytest.mark.skipif(not NativeRelay.usable(), reason="the native relay was not built")


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_support, "PATH", "native")


def by_thread(it: Chain, number: int) -> int:
    """Return how many connections to a worker the native relay thread has."""
    upstream = it.upstreams[number]
    assert isinstance(upstream, NativeUpstream)
    return upstream.thread_connections


async def test_the_thread_serves_the_first_worker_and_python_the_next() -> None:
    async with chain(dies, serves) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        first, second = it.upstreams
        assert (by_thread(it, 0), by_thread(it, 1)) == (0, 0)
        assert (first.open_connections, second.open_connections) == (0, 1)
    async with chain(serves) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        assert by_thread(it, 0) == 1
        (outcome,) = it.outcomes
        assert (outcome.error, outcome.events) == (None, TOTAL + 1)


async def test_a_request_for_token_ids_is_served_by_python() -> None:
    async with chain(serves) as it:
        reply = await fetch(it.port, request_bytes(return_token_ids=True))
        assert body_of(reply).count(b'"token_ids":[') == TOTAL
        assert (by_thread(it, 0), it.upstreams[0].open_connections) == (0, 1)


async def test_a_worker_may_die_after_any_byte() -> None:
    """If a worker dies at any byte, within the reply's head, a chunk line or an event, the client
    gets the same stream as from a healthy worker.
    """
    where = 0

    async def dies_there(call: WorkerCall) -> None:
        reply = STREAM + chunked(*events_for(call))
        await call.send(reply[:where])
        call.reset() if where % 2 else call.hang_up()

    body = json.dumps(BODY | {"return_token_ids": True})
    call = WorkerCall(b"", body.encode(), None, None, 0)  # type: ignore[arg-type]
    length = len(STREAM + chunked(*events_for(call)))
    async with chain(dies_there, serves) as it:
        for where in range(1, length, 3):
            reply = await fetch(it.port, request_bytes())
            assert body_of(reply) == WHOLE, f"died after {where} bytes"
        assert it.metrics.unfit == {}


@pytest.mark.parametrize("framing", [b"Connection: close\r\n", b"Content-Length: %d\r\n"])
async def test_the_client_gets_chunks_for_any_framing_of_the_worker(framing: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

    def reply(call: WorkerCall) -> bytes:
        body = b"".join(events_for(call))
        return head + (framing % len(body) if b"%d" in framing else framing) + b"\r\n" + body

    async def sends_all(call: WorkerCall) -> None:
        await call.send(reply(call))
        call.hang_up()

    async def breaks_off(call: WorkerCall) -> None:
        await call.send(reply(call)[:700])
        call.hang_up()

    for scripts in ((sends_all,), (breaks_off, serves)):
        async with chain(*scripts) as it:
            got = await fetch(it.port, request_bytes())
            assert body_of(got) == WHOLE
            assert header(got, b"content-length") is None
            assert header(got, b"transfer-encoding") == b"chunked"


async def test_pending_bytes_of_a_slow_client_come_before_the_next_workers() -> None:
    """Bytes that a slow client had not yet taken come before those of the next worker; the relay
    thread ends with bytes that it could not write yet.
    """
    text = "x" * 250_000
    total = 40

    def event(number: int, prompt: str) -> bytes:
        choice = f'{{"index":0,"text":"{number}{text}","token_ids":[{number}]{prompt}}}'
        return f'data: {{"id":"a","choices":[{choice}]}}\n\n'.encode()

    async def sends_half(call: WorkerCall) -> None:
        first = event(0, ',"prompt_token_ids":[1]')
        await call.send(STREAM + framed(first, *(event(n, "") for n in range(1, total))))
        call.hang_up()

    async def sends_rest(call: WorkerCall) -> None:
        assert json.loads(call.body)["prompt"] == [1, *range(total)]
        await call.send(STREAM + chunked(event(total, ""), b"data: [DONE]\n\n"))

    async with chain(sends_half, sends_rest, buffer_bytes=1 << 26) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=4096)
        writer.write(request_bytes(max_tokens=total + 1))
        await until(lambda: len(it.outcomes) == 2, "the second worker is through")
        got = body_of(await reader.read(-1))
        writer.close()
        numbers = [event.partition(b'"text":"')[2] for event in got.split(b"\n\n")]
        said = [int(number.partition(b"x")[0]) for number in numbers if number]
        assert said == list(range(total + 1))
        assert b"token_ids" not in got


async def test_begun_streams_of_a_hanging_worker_move() -> None:
    """If a worker's probes time out, its begun streams continue on another worker."""

    async def hangs(call: WorkerCall) -> None:
        await call.send(STREAM + framed(*events_for(call)[:2]))
        await call.reader.read()

    async with chain(hangs, serves) as it:
        asking = asyncio.create_task(fetch(it.port, request_bytes()))
        await until(lambda: it.metrics.kept_tokens() == len(PROMPT) + 2, "two tokens were said")
        it.upstreams[0].abandon_silent()
        assert body_of(await asking) == WHOLE
        assert it.metrics.ended == {("moved", "early_close"): 1}


async def test_a_stream_that_may_not_move_stays_with_a_hanging_worker() -> None:
    go = asyncio.Event()

    async def ignores_ids(call: WorkerCall) -> None:
        events = Engine("warmroute", "x").stream(BODY, PROMPT, TOTAL)
        await call.send(STREAM + framed(*events[:2]))
        await go.wait()
        await call.send(chunked(*events[2:]))

    async with chain(ignores_ids) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(request_bytes())
        got = await reader.readuntil(b"data: ")
        it.upstreams[0].abandon_silent()
        go.set()
        got += await reader.read(-1)
        writer.close()
        assert body_of(got) == WHOLE
        assert header(got, b"x-warmroute-migratable") is None


@pytest.mark.parametrize("leaves", [True, False])
async def test_an_abandoned_stream_keeps_no_memory(leaves: bool) -> None:
    """No memory is kept for a stream that is given up by its client (`leaves`) or by a deadline in
    the router.
    """

    async def hangs(call: WorkerCall) -> None:
        await call.send(STREAM + framed(*events_for(call)[:2]))
        await call.reader.read()

    async with chain(hangs, serves) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(request_bytes())
        await until(lambda: it.metrics.kept_tokens() > 0, "the stream has begun")
        if leaves:
            writer.close()
        else:
            it.sending.cancel()
            assert is_incomplete(await reader.read())
        await until(lambda: it.metrics.kept_tokens() == 0, "the ids are forgotten")
        writer.close()
        assert len(it.outcomes) == 0


async def test_an_unreadable_event_prevents_later_moves() -> None:
    async def sends_unreadable_event(call: WorkerCall) -> None:
        odd = b'data: {"choices":[{"t\\u0065xt":"y","token_ids":[5]}]}\n\n'
        await call.send(STREAM + framed(*events_for(call)[:2], odd))
        call.hang_up()

    async with chain(sends_unreadable_event, serves) as it:
        reply = await fetch(it.port, request_bytes())
        assert is_incomplete(reply)
        assert b'{"t\\u0065xt":"y"}' in reply
        assert it.metrics.unfit == {"unreadable": 1}
