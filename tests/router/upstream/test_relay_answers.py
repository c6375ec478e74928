"""Tests of replies with status 200 that contain no answer: another worker is tried, and the failure
is charged to the right worker.
"""

from __future__ import annotations

import asyncio

import pytest

from kvkernels import AnswerDue
from router.http.reply import Outcome, RelayLimits, Timeouts
from tests.router.http.answer_bodies import (
    BAD_STREAMS,
    BAD_WHOLE,
    CLIENTS,
    ERROR,
    GOOD_STREAMS,
    GOOD_WHOLE,
    ROLE,
    case_id,
    chunk,
    events,
    text,
    usage,
)
from tests.router.relay_support import (
    DEADLINE_S,
    STREAM,
    WorkerCall,
    chunked,
    fetch,
    kind,
    post,
    relay,
    until,
    worker,
)

pytestmark = pytest.mark.usefixtures("both_paths")

DUE = AnswerDue("completions")
GOOD = events(text("well", "stop"))
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def json_reply(body: bytes) -> bytes:
    return JSON + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def stream(*pieces: bytes) -> bytes:
    return STREAM + chunked(*pieces)


async def relay_replies(
    *replies: bytes, cuts: list[int] | None = None
) -> tuple[bytes, list[Outcome]]:
    """Return the client's bytes and the outcome of each attempt, where the workers send these
    replies in turn.
    """

    async def send_next_reply(call: WorkerCall) -> None:
        reply = pending.pop(0)
        await call.send_in_pieces(reply, sorted(at % len(reply) for at in cuts or []))
        if reply.startswith(CLOSED):
            call.hang_up()

    pending = list(replies)
    async with worker(send_next_reply) as w, relay(*[w.port] * len(replies), due=DUE) as r:
        got = await fetch(r.port, post())
        await until(lambda: bool(r.outcomes), "it is over")
        return got, r.outcomes


@pytest.mark.parametrize(("name", "body"), BAD_STREAMS, ids=case_id)
async def test_a_stream_without_content_is_retried_at_another_worker(
    name: str, body: bytes
) -> None:
    pieces = [part + b"\n\n" for part in body.split(b"\n\n") if part] or [body]
    bad = stream(*(piece for piece in pieces if piece))
    for reply in (bad, CLOSED + body):
        got, outcomes = await relay_replies(reply, stream(GOOD), cuts=[150, 170, 200, 290])
        assert got.endswith(chunked(GOOD))
        assert b"X-Warmroute-Worker: w" in got
        assert len(got.split(b"HTTP/1.1")) == 2
        first, second = outcomes
        assert kind(first.error) == "no_answer"
        assert (first.status, first.bytes_to_client, first.first_byte_s) == (200, 0, None)
        assert first.held is not None
        assert first.held.body.strip() == body.strip()
        assert (second.error, second.events) == (None, 2)


@pytest.mark.parametrize(("name", "body"), BAD_WHOLE, ids=case_id)
async def test_a_body_without_content_is_retried_at_another_worker(name: str, body: bytes) -> None:
    good = b'{"choices":[{"text":"well"}]}'
    for reply in (
        json_reply(body),
        JSON + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body or b" "),
    ):
        got, (first, second) = await relay_replies(reply, json_reply(good), cuts=[90, 120])
        assert got.endswith(b"\r\n\r\n" + good)
        assert kind(first.error) == "no_answer"
        assert second.error is None


@pytest.mark.parametrize("cuts", [[], [150, 160, 190, 230, 300]])
@pytest.mark.parametrize(("name", "body"), GOOD_STREAMS, ids=case_id)
async def test_a_short_stream_is_passed_on_unchanged(
    name: str, body: bytes, cuts: list[int]
) -> None:
    half = len(body) // 2
    reply = stream(body[:half], body[half:])
    got, (outcome,) = await relay_replies(reply, cuts=cuts)
    assert got.endswith(chunked(body[:half], body[half:]))
    assert outcome.error is None
    assert outcome.answers == (name != "clients_fault")
    got, (outcome,) = await relay_replies(CLOSED + body, cuts=cuts)
    assert got.endswith(b"\r\n\r\n" + body)
    assert outcome.error is None


@pytest.mark.parametrize(("name", "body"), GOOD_WHOLE, ids=case_id)
async def test_a_short_body_is_passed_on_unchanged(name: str, body: bytes) -> None:
    got, (outcome,) = await relay_replies(json_reply(body), cuts=[60, 100, 130, 150])
    assert got.endswith(b"\r\n\r\n" + body)
    assert outcome.error is None


async def test_if_no_worker_answers_the_last_reply_is_passed_on() -> None:
    page = b"<html>hello</html>"
    got, outcomes = await relay_replies(stream(events(ERROR)), json_reply(page))
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert got.endswith(b"\r\n\r\n" + page)
    assert [kind(one.error) for one in outcomes] == ["no_answer"] * 2
    assert str(outcomes[0].error) == "the worker's reply of status 200 is an error"
    assert str(outcomes[1].error) == "the worker's reply of status 200 is not JSON"


async def test_a_reply_without_an_answer_needs_at_most_one_more_connection() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(stream(events()) if call.serial == 0 else stream(GOOD))

    async with worker(script) as w, relay(w.port, w.port, due=DUE) as r:
        await fetch(r.port, post())
        await until(lambda: bool(r.outcomes), "it is over")
        assert w.connections <= 2


@pytest.mark.parametrize("said", [b"", events(ROLE, done=False), b": ping\n\n", b"data: {"])
async def test_a_stream_that_ends_before_any_content_is_retried(said: bytes) -> None:
    async def script(call: WorkerCall) -> None:
        if len(w.calls) == 1:
            await call.send(STREAM + (chunked(said)[:-5] if said else b""))
            call.hang_up()
        else:
            await call.send(stream(GOOD))

    async with worker(script) as w, relay(w.port, w.port, due=DUE) as r:
        assert (await fetch(r.port, post())).endswith(chunked(GOOD))
        await until(lambda: len(r.outcomes) == 2, "both are over")
        assert kind(r.outcomes[0].error) == "early_close"
        assert r.outcomes[0].bytes_to_client == 0


async def test_the_first_token_is_reported_at_the_first_content() -> None:
    """The relay reports the first token at the first content, not at the role before it; the bytes
    keep their order.
    """
    go = asyncio.Event()
    role, content = events(ROLE, done=False), events(chunk({"content": "x"}), done=False)

    async def script(call: WorkerCall) -> None:
        await call.send(STREAM + chunked(role)[:-5])
        await go.wait()
        await call.send(chunked(content, events()))

    async with worker(script) as w, relay(w.port, due=DUE) as r:
        asking = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: len(w.calls) == 1, "it is asked")
        await asyncio.sleep(0.1)
        assert not r.first_bytes_s
        assert not r.progress
        go.set()
        assert (await asking).endswith(chunked(role, content, events()))
        await until(lambda: bool(r.outcomes), "it is over")
        assert r.outcomes[0].first_byte_s == r.first_bytes_s[0]
        assert r.outcomes[0].events == 3


async def test_keep_alive_comments_are_passed_on_in_time() -> None:
    """Keep-alive comments are passed on in time; as the client has seen them, no other worker is
    tried. An empty end is still the worker's failure, and the client gets all bytes that the worker
    sent.
    """
    go, ping = asyncio.Event(), b": ping\n\n"

    async def script(call: WorkerCall) -> None:
        await call.send(STREAM + chunked(ping)[:-5])
        await go.wait()
        await call.send(chunked(events()))

    limits = RelayLimits(held_s=0.05)
    async with worker(script) as w, relay(w.port, w.port, due=DUE, limits=limits) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(post())
        async with asyncio.timeout(DEADLINE_S):
            got = await reader.readuntil(chunked(ping)[:-5])
            assert not r.first_bytes_s
            go.set()
            got += await reader.read()
        writer.close()
        assert got.endswith(chunked(ping, events()))
        await until(lambda: bool(r.outcomes), "it is over")
        (outcome,) = r.outcomes
        assert kind(outcome.error) == "no_answer"
        assert not outcome.retryable
        assert outcome.bytes_to_client > 0
        assert outcome.first_byte_s is None
        assert not r.first_bytes_s


async def test_the_timeouts_of_a_begun_reply_apply_before_any_content() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM + chunked(events(ROLE, done=False))[:-5])
        await call.reader.read()

    times = Timeouts(first_byte_s=DEADLINE_S, between_s=0.1)
    async with worker(script) as w, relay(w.port, due=DUE, timeouts=times) as r:
        await fetch(r.port, post())
        await until(lambda: bool(r.outcomes), "it is over")
        assert kind(r.outcomes[0].error) == "timeout_between"
        assert r.outcomes[0].retryable


async def test_a_worker_abandoned_before_any_content_is_replaced() -> None:
    async def script(call: WorkerCall) -> None:
        if len(w.calls) == 1:
            await call.send(STREAM + chunked(events(ROLE, done=False))[:-5])
            await call.reader.read()
        else:
            await call.send(stream(GOOD))

    async with worker(script) as w, relay(w.port, w.port, due=DUE) as r:
        asking = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: len(w.calls) == 1, "it is asked")
        await asyncio.sleep(0.05)
        r.upstreams[0].abandon_silent()
        assert (await asking).endswith(chunked(GOOD))


@pytest.mark.parametrize(
    ("end", "failed"),
    [(ERROR, True), (CLIENTS, False), (text("", "abort"), True), (text("", "stop"), False)],
)
async def test_an_error_after_content_is_passed_on_and_charged_to_the_worker(
    end: dict[str, object], failed: bool
) -> None:
    body = [events(one, done=False) for one in (text("x"), end, {"choices": [], **usage(1)})]
    for reply in (stream(*body, events()), CLOSED + b"".join(body)):
        got, (outcome,) = await relay_replies(reply, cuts=[200, 300])
        assert got.endswith(reply.partition(b"\r\n\r\n")[2])
        assert outcome.first_byte_s is not None
        assert not outcome.retryable
        if failed:
            assert kind(outcome.error) == "no_answer"
        else:
            assert outcome.error is None


async def test_replies_that_are_not_judged_are_passed_on() -> None:
    for reply in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n",
    ):

        async def script(call: WorkerCall, reply: bytes = reply) -> None:
            await call.send(reply)

        due = None if b" 200 " in reply else DUE
        async with worker(script) as w, relay(w.port, due=due) as r:
            assert (await fetch(r.port, post())).startswith(reply[:16])
            await until(lambda r=r: bool(r.outcomes), "it is over")
            assert r.outcomes[0].error is None


async def test_a_failed_reply_that_is_too_long_is_not_kept() -> None:
    long = events(ERROR, done=False) + b"x" * 2_000
    limits = RelayLimits(held_bytes=1_000)

    async def script(call: WorkerCall) -> None:
        await call.send(stream(long))

    async with worker(script) as w, relay(w.port, due=DUE, limits=limits) as r:
        await fetch(r.port, post())
        await until(lambda: bool(r.outcomes), "it is over")
        assert kind(r.outcomes[0].error) == "no_answer"
        assert r.outcomes[0].held is None
