"""Tests of the meter that counts events and finds the usage in a passing reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.reply import Usage
from router.upstream.meter import Meter
from tests.router.property_support import cut, patient

CUTS = st.lists(st.integers(0, 10_000), max_size=30)

USAGE = (
    b'{"usage":{"prompt_tokens":7,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":5}}}'
)


@patient
@given(CUTS)
def test_events_and_usage_are_read_however_the_body_is_cut(cuts: list[int]) -> None:
    text = b'data: {"t":"a data: b \\"usage\\": {","usage": null}\n\n' * 3
    text += b": ping\n\ndata: " + USAGE + b"\n\ndata: [DONE]\n\n"
    meter = Meter(event_stream=True, tail_bytes=8192)
    for piece in cut(text, cuts):
        meter.feed(piece)
    assert meter.events == 5
    assert meter.usage() == Usage(7, 2, 5)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (USAGE, Usage(7, 2, 5)),
        (b'{"usage" : {"prompt_tokens":7}}', Usage(7)),
        (b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}', Usage(7)),
        (b'{"usage":{}}', Usage()),
        (b'{"usage":{"a":{"b":{}},"c":{},"prompt_tokens":7,"d":{"e":{}}},"f":{}}', Usage(7)),
        (b'{"usage":{"a":"}","prompt_tokens":7}}', Usage(7)),
        (b'{"usage":{"a":"{","prompt_tokens":7}}', Usage(7)),
        (b'{"usage":{"a":NaN,"prompt_tokens":7}}', Usage(7)),
        (b'{"usage":{"a":"\xff","prompt_tokens":7}}', Usage(7)),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":-1}}', None),
        (b'{"usage":{"prompt_tokens":"7"}}', None),
        (b'{"usage":{"prompt_tokens":7', None),
        (b'{"usage":' + b'{"a":' * 1000, None),
        (b'{"text":"\\"usage\\":{}"}', None),
        (b"\xff\xfe" * 10 + USAGE, Usage(7, 2, 5)),
        (USAGE + b" " * 9000, None),
        (b"", None),
    ],
)
def test_usage_of_a_reply_without_events_is_read(body: bytes, usage: Usage | None) -> None:
    meter = Meter(event_stream=False, tail_bytes=8192)
    meter.feed(body)
    assert meter.usage() == usage
    assert meter.events == 0


def test_the_kept_tail_is_bounded() -> None:
    meter = Meter(event_stream=True, tail_bytes=1000)
    for _ in range(10_000):
        meter.feed(b"data: 0123456789\n\n")
    assert meter._kept_bytes < 1100
