"""Tests of migrated streams over real sockets: how workers may fail, and what the client then
reads.
"""

from __future__ import annotations

import json

import pytest

from policies.facts import Arrival
from router.migration.journal import Journal
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
from tests.router.migration.migration_support import TOTAL, chain
from tests.router.relay_support import (
    STREAM,
    WorkerCall,
    chunked,
    fetch,
    header,
    kind,
    post,
)
from tests.router.waiting import until

pytestmark = pytest.mark.usefixtures("both_paths")


async def test_a_moved_stream_is_delivered_and_counted_as_one_answer() -> None:
    async with chain(dies, serves) as it:
        reply = await fetch(it.port, request_bytes())
        assert body_of(reply) == WHOLE
        assert header(reply, b"x-warmroute-migratable") == b"1"
        assert it.metrics.ended == {("moved", "early_close"): 1}
        assert sum(it.metrics.gap.totals()[0]) == 1
        first, last = it.outcomes
        assert (kind(first.error), first.resumable, first.events) == ("early_close", True, 2)
        assert (last.error, last.events, last.first_byte_s) == (None, TOTAL + 1, None)
        (rest,) = it.rests
        assert rest is not None
        assert (rest.prompt_tokens, rest.max_output_tokens) == (len(PROMPT) + 2, TOTAL - 2)
        assert (rest.approximate, list(map(len, rest.chains.values()))) == (False, [1])


async def test_usage_of_a_moved_stream_covers_all_of_it() -> None:
    async with chain(dies, serves) as it:
        options = {"stream_options": {"include_usage": True}}
        reply = await fetch(it.port, request_bytes(**options))
        assert body_of(reply) == b"".join(
            Engine("warmroute", "x").stream(BODY | options, PROMPT, TOTAL)
        )
        usage = it.outcomes[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), TOTAL)


async def test_an_http_1_0_client_reads_events_without_chunks() -> None:
    async with chain(dies, serves) as it:
        reply = await fetch(it.port, post(json.dumps(BODY).encode(), version=b"1.0"))
        assert reply.partition(b"\r\n\r\n")[2] == WHOLE


@pytest.mark.parametrize("status", [b"400 Bad", b"404 Gone", b"200 OK"])
async def test_an_error_reply_of_the_next_worker_is_not_part_of_the_stream(status: bytes) -> None:
    async def refuses(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nno")

    async with chain(dies, refuses, serves) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        assert [o.error and kind(o.error) for o in it.outcomes] == ["early_close", "busy", None]
    async with chain(refuses) as it:
        assert (await fetch(it.port, request_bytes())).endswith(b"\r\n\r\nno")


async def test_a_5xx_of_a_later_worker_is_one_more_failure() -> None:
    async def fails(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno")

    async with chain(fails, dies, fails, serves) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        assert it.metrics.ended == {("moved", "status_5xx"): 1}


async def test_a_compressed_stream_passes_unchanged_and_is_not_moved() -> None:
    head = STREAM.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")

    async def packed(call: WorkerCall) -> None:
        await call.send(head + chunked(b"\x1f\x8b", b"zip"))

    async def breaks_off(call: WorkerCall) -> None:
        await call.send(head + framed(b"\x1f\x8b"))
        call.hang_up()

    async with chain(packed) as it:
        assert body_of(await fetch(it.port, request_bytes())) == b"\x1f\x8bzip"
    async with chain(breaks_off, serves) as it:
        assert is_incomplete(await fetch(it.port, request_bytes()))
        assert not it.outcomes[0].retryable


async def test_the_router_writes_the_missing_end_of_a_finished_answer() -> None:
    async def omits_the_end(call: WorkerCall) -> None:
        await call.send(STREAM + framed(*events_for(call)[:TOTAL]))
        call.reset()

    async with chain(omits_the_end) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        assert sum(it.metrics.ended.values()) == it.metrics.ended["closed", "early_close"] == 1


async def test_an_error_event_is_hidden_while_another_worker_is_available() -> None:
    async def sends_error_event(call: WorkerCall) -> None:
        error = b'data: {"error":{"message":"engine died","code":500}}\n\n'
        await call.send(STREAM + chunked(*events_for(call)[:3], error, b"data: [DONE]\n\n"))

    async with chain(sends_error_event, serves) as it:
        assert body_of(await fetch(it.port, request_bytes())) == WHOLE
        assert it.metrics.ended == {("moved", "status_5xx"): 1}


async def test_a_stream_beyond_a_bound_breaks_off() -> None:
    bounds = (("stream_tokens", 4, "room"), ("tokens", 2, "room"), ("moves", 1, "moves"))
    for name, bound, why in bounds:
        async with chain(dies, dies, serves, **{name: bound}) as it:
            assert is_incomplete(await fetch(it.port, request_bytes()))
            assert it.metrics.unfit == {why: 1}
            assert it.metrics.ended["unfit", "early_close"] == 1


async def test_a_stream_breaks_off_if_no_worker_is_left() -> None:
    async with chain(dies, dies) as it:
        assert is_incomplete(await fetch(it.port, request_bytes()))
        assert it.metrics.ended["refused", "early_close"] == 1


async def test_streams_of_a_model_with_missing_token_ids_no_longer_move() -> None:
    async def omits_an_event(call: WorkerCall) -> None:
        events = events_for(call)
        await call.send(STREAM + chunked(*events[:2], *events[3:]))

    async with chain(omits_an_event) as it:
        await fetch(it.port, request_bytes(stream_options={"include_usage": True}))
        arrival = Arrival(0.0, 2, "m", 3, {})
        with it.migrations.stream(json.dumps(BODY).encode(), "/v1/completions", arrival) as stream:
            assert stream is None
        assert it.metrics.unfit == {"miscounted": 1}


async def test_an_exception_in_the_journal_closes_the_clients_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def feed(journal: Journal, payload: bytes) -> bytes:
        seen.append(payload)
        if len(seen) > 1:
            raise RuntimeError("a defect")
        return real(journal, payload)

    async def in_two_parts(call: WorkerCall) -> None:
        events = events_for(call)
        await call.send(STREAM + framed(*events[:2]))
        await until(lambda: bool(seen), "the first event was read")
        await call.send(framed(events[2]))

    real = Journal.feed
    monkeypatch.setattr(Journal, "feed", feed)
    async with chain(in_two_parts) as it:
        with pytest.raises(ConnectionResetError):  # a mere end would look whole to this client
            await fetch(it.port, post(json.dumps(BODY).encode(), version=b"1.0"))
