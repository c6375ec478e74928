"""Tests of request deadlines: they are read from headers, enforced, and passed on to workers."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.errors import ClientError
from router.http.messages import Request
from router.http.parser import Fields, Head
from router.http.reply import Outcome, Timeouts
from router.request.deadlines import ENVOY_HEADER, Deadlines, in_time, is_late, late_answer
from router.upstream.client_reply import ClientReply, upstream_request

OWN = "x-request-timeout-ms"


class Reply:
    """The attributes of a client's reply that the code under test reads. Lifetime: test."""

    def __init__(self, body_length: int) -> None:
        self.body_length = body_length
        self.begun = body_length > 0
        self.aborted = False

    def abort(self, late: bool = False) -> None:
        self.aborted = late


def client_reply(body_length: int) -> ClientReply:
    return cast(ClientReply, Reply(body_length))


@given(
    own=st.none() | st.integers(0, 86_400_000),
    envoy=st.none() | st.integers(0, 86_400_000),
    total_s=st.sampled_from([0.0, 5.0]),
)
def test_the_earliest_deadline_applies(own: int | None, envoy: int | None, total_s: float) -> None:
    headers = {OWN: own, ENVOY_HEADER: envoy}
    told = {name: str(ms) for name, ms in headers.items() if ms is not None}
    bounds = [ms / 1e3 for ms in (own, envoy) if ms] + ([total_s] if total_s else [])
    deadline_s = Deadlines(total_s=total_s).deadline_s(told.get, 100.0)
    assert deadline_s == (100.0 + min(bounds) if bounds else None)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e3", "soon", "٣", "86400001", "9" * 5_000])
@pytest.mark.parametrize("name", [OWN, ENVOY_HEADER])
def test_an_invalid_timeout_header_gets_400_with_its_name(name: str, text: str) -> None:
    with pytest.raises(ClientError) as caught:
        Deadlines().deadline_s({name: text}.get, 0.0)
    assert caught.value.status == 400
    assert name in caught.value.message


def test_longer_prompts_and_non_streaming_answers_get_more_time() -> None:
    told = Timeouts(first_byte_s=5.0)
    deadlines = Deadlines(ms_per_token=2.0, whole_answer_s=60.0)
    assert deadlines.timeouts(told, True, 1_000).first_byte_s == 7.0
    assert deadlines.timeouts(told, False, 1_000).first_byte_s == 62.0
    assert Deadlines(whole_answer_s=5.0).timeouts(told, False, 1_000) is told


def test_a_worker_gets_only_the_remaining_time() -> None:
    text = b"POST /x HTTP/1.1\r\nX-Request-Timeout-Ms: 900\r\nA: 1\r\n%b: 7\r\n\r\n"
    head = Head(b"", 0, "POST", "/x", Fields(text % ENVOY_HEADER.encode()), False)
    http, deadlines = Request(None, head, b""), Deadlines()
    left = (deadlines.left(0.2509),)
    sent = upstream_request(http, b"", after=left, hidden=deadlines.names())
    assert tuple(sent.headers) == ((b"A", b"1"),)
    assert sent.internal_headers == ((OWN.encode(), b"250"),)
    assert deadlines.left(-1.0) == (OWN.encode(), b"1")


@pytest.mark.parametrize("begun_bytes", [0, 7])
async def test_an_attempt_ends_at_its_deadline_and_a_begun_reply_is_cut_off(
    begun_bytes: int,
) -> None:
    cancelled = asyncio.Event()

    async def never() -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    reply = client_reply(begun_bytes)
    clock = asyncio.get_running_loop().time
    outcome = await in_time(never(), reply, clock() + 0.01, clock)
    assert cancelled.is_set()
    assert is_late(outcome)
    assert not outcome.retryable
    assert outcome.bytes_to_client == begun_bytes
    assert cast(Reply, reply).aborted is bool(begun_bytes)
    answer = late_answer(reply)
    assert answer is reply if begun_bytes else answer.status == 504


async def test_an_attempt_within_its_deadline_is_not_changed() -> None:
    async def well() -> Outcome:
        return Outcome(started_s=0.0, status=200)

    clock = asyncio.get_running_loop().time
    outcome = await in_time(well(), client_reply(9), clock() + 60.0, clock)
    assert (outcome.status, is_late(outcome)) == (200, False)


async def test_a_client_that_leaves_does_not_count_as_a_deadline() -> None:
    async def never() -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    clock = asyncio.get_running_loop().time
    task = asyncio.create_task(in_time(never(), client_reply(0), clock() + 60.0, clock))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
