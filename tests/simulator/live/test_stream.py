"""Tests of the stream meter: it counts and times tokens however the bytes are split."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.live.client import StreamMeter

USAGE = (
    b'data: {"choices":[],"usage":{"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":64}}}\n\n'
)
TOKEN = b'data: {"choices":[{"text":" t1"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_the_meter_measures_first_token_and_gaps() -> None:
    meter = StreamMeter()
    meter.feed(b": ping\n\n", 0.5)
    assert meter.first_s is None
    for now_s in (1.0, 1.5, 3.0):
        meter.feed(TOKEN, now_s)
    meter.feed(DONE, 9.0)
    assert meter.first_s == 1.0
    assert meter.gap_max_s == 1.5
    assert meter.finish() == (3, None, None)


@given(seed=st.integers(0, 1 << 32), tokens=st.integers(1, 40), usage=st.booleans())
def test_any_split_of_a_stream_gives_the_same_result(seed: int, tokens: int, usage: bool) -> None:
    stream = TOKEN * tokens + (USAGE if usage else b"") + DONE
    random = Random(seed)
    meter, start = StreamMeter(), 0
    while start < len(stream):
        end = start + random.randrange(1, 80)
        meter.feed(stream[start:end], float(start))
        start = end
    assert meter.events == tokens + usage + 1
    assert meter.finish() == ((5, 64, None) if usage else (tokens, None, None))


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b"", "DONE"),
        (TOKEN * 3, "DONE"),
        (TOKEN + DONE[:8], "DONE"),
        (DONE, "no token"),
        (b'data: {"error":{"message":"broken"}}\n\n' + DONE, "broken"),
        (b"data: garbage\n\n" + DONE, "JSON"),
        (b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n' + DONE, "no token"),
    ],
)
def test_an_incomplete_answer_is_reported(stream: bytes, said: str) -> None:
    meter = StreamMeter()
    meter.feed(stream, 1.0)
    error = meter.finish()[2]
    assert error is not None
    assert said in error


def test_the_meters_memory_is_bounded() -> None:
    meter = StreamMeter()
    for _ in range(200):
        meter.feed(TOKEN * 100, 1.0)
    meter.feed(USAGE + DONE, 2.0)
    assert meter.finish() == (5, 64, None)
    assert len(meter._tail) <= 8192
