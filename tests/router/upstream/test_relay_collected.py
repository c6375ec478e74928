"""Tests of replies that the router needs for itself: both implementations of the relay collect them
whole.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from router.http.reply import Outcome, Timeouts, UpstreamRequest, Usage
from router.upstream.collected_reply import CollectedReply
from tests.router.relay_support import WorkerCall, chunked, relay, until, worker

pytestmark = pytest.mark.usefixtures("both_paths")

BODY = b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"kv_transfer_params":{"a":[1, 2]}}'
REQUEST = UpstreamRequest("POST", "/v1/completions", (), b'{"max_tokens":1}')


@dataclass(frozen=True, slots=True)
class Collected:
    reply: CollectedReply
    outcome: Outcome
    head: bytes


async def collect(
    said: bytes, *pieces: bytes, limit_bytes: int = 1_024, hang_up: bool = False
) -> Collected:
    async def script(call: WorkerCall) -> None:
        for piece in (said, *pieces):
            await call.send(piece)
            await asyncio.sleep(0)
        if hang_up:
            call.hang_up()

    async with worker(script) as w, relay(w.port) as r:
        reply = CollectedReply(limit_bytes)
        outcome = await r.upstreams[0].send(REQUEST, reply, Timeouts())
        return Collected(reply, outcome, w.calls[0].head)


def of_length(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


@pytest.mark.parametrize(
    ("said", "hang_up"),
    [
        ([of_length(BODY)], False),
        ([of_length(BODY)[:40], of_length(BODY)[40:90], of_length(BODY)[90:]], False),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked(BODY)], False),
        ([b"HTTP/1.1 200 OK\r\n\r\n", BODY], True),
    ],
    ids=["length", "pieces", "chunks", "close"],
)
async def test_a_complete_reply_is_collected(said: list[bytes], hang_up: bool) -> None:
    got = await collect(*said, hang_up=hang_up)
    assert (got.reply.whole, got.reply.body) == (True, BODY)
    outcome = got.outcome
    assert (outcome.status, outcome.error, outcome.held) == (200, None, None)
    assert outcome.usage == Usage(9, 1, None)
    assert outcome.started_s <= (outcome.first_byte_s or 0.0) <= (outcome.last_byte_s or 0.0)
    assert b"POST /v1/completions HTTP/1.1" in got.head


async def test_a_refusal_is_held_for_delivery() -> None:
    got = await collect(of_length(b'{"error":{}}', b"400 Bad Request", b"X-A: b\r\n"))
    assert (got.outcome.status, got.outcome.error) == (400, None)
    held = got.reply.held
    assert held is not None
    assert (held.head.status, held.body) == (400, b'{"error":{}}')
    assert (b"X-A", b"b") in held.head.headers


async def test_a_failure_is_held_for_delivery() -> None:
    got = await collect(of_length(b"full", b"503 Busy", b"Retry-After: 1\r\n"))
    assert got.outcome.error is not None
    assert got.outcome.error.kind == "busy"
    assert got.outcome.held is not None
    assert got.outcome.held.body == b"full"
    assert not got.reply.whole


async def test_a_reply_beyond_the_limit_is_incomplete() -> None:
    assert (await collect(of_length(BODY), limit_bytes=len(BODY))).reply.whole
    assert not (await collect(of_length(BODY), limit_bytes=len(BODY) - 1)).reply.whole


async def test_a_reply_that_breaks_off_is_a_worker_error() -> None:
    got = await collect(of_length(BODY)[:-5], hang_up=True)
    assert got.outcome.error is not None
    assert got.outcome.error.kind == "early_close"
    assert not got.reply.whole


@pytest.mark.parametrize("begun", [b"", of_length(BODY)[:-5]], ids=["silent", "begun"])
async def test_a_cancelled_collection_closes_the_workers_connection(begun: bytes) -> None:
    asked = asyncio.Event()

    async def script(call: WorkerCall) -> None:
        await call.send(begun)
        asked.set()
        await call.reader.read()

    async with worker(script) as w, relay(w.port) as r:
        sending = asyncio.ensure_future(
            r.upstreams[0].send(REQUEST, CollectedReply(1_024), Timeouts())
        )
        await asked.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: w.gone == 1, "its connection is closed")
