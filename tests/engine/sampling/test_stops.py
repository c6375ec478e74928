"""Tests of stop strings in streamed text: text is sent as early as possible and never
taken back.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.sampling.stops import StopText, TextPiece
from tests.effort import examples


def text_up_to_stop(text: str, stops: tuple[str, ...], included: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that ends first (of several the one that begins first),
    and this stop string. The tests compare with this plain search.
    """
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if included else end - len(stop)], stop
    return text, None


def push_all(pieces: list[str], stop_text: StopText) -> tuple[str, str | None]:
    said = ""
    for text in pieces:
        piece = stop_text.push(text)
        said += piece.text
        if piece.stop is not None:
            return said, piece.stop
    return said + stop_text.flush(), None


TEXTS = st.text("abc", max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(
    pieces=st.lists(TEXTS, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    included=st.booleans(),
)
def test_a_text_ends_at_the_same_place_however_it_is_split(pieces, stops, included):
    got = push_all(pieces, StopText(tuple(stops), included=included, min_tokens=0))
    assert got == text_up_to_stop("".join(pieces), tuple(stops), included)


@settings(max_examples=examples(200), deadline=None)
@given(pieces=st.lists(TEXTS, max_size=12), stop=st.text("abc", min_size=1, max_size=5))
def test_only_text_that_may_begin_a_stop_string_is_held_back(pieces, stop):
    """Text is held back only while it may be the beginning of a stop string, so it is never sent
    later than needed.
    """
    stop_text = StopText((stop,), included=False, min_tokens=0)
    given_text = said = ""
    for text in pieces:
        piece = stop_text.push(text)
        if piece.stop:
            return
        given_text += text
        said += piece.text
        held = given_text[len(said) :]
        assert given_text.startswith(said)
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_no_stop_string_ends_an_answer_before_min_tokens():
    params = SamplingParams(stop=("ab",), min_tokens=2)
    stop_text = StopText.of(params)
    assert [stop_text.push(text) for text in ("ab", "a", "b", "xa")] == [
        *(TextPiece("ab"), TextPiece("a"), TextPiece("b"), TextPiece("x"))
    ]
    assert stop_text.push("b!") == TextPiece("", "ab")


def test_a_request_without_stop_strings_holds_no_text_back():
    assert StopText.of(None).push("ab") == TextPiece("ab")
    assert StopText.of(SamplingParams(min_tokens=3)).push("ab") == TextPiece("ab")


def test_text_after_a_stop_string_is_rejected():
    stop_text = StopText(("x",), included=True, min_tokens=0)
    assert stop_text.push("axb") == TextPiece("ax", "x")
    assert stop_text.flush() == ""
    with pytest.raises(ValueError, match="after the stop string"):
        stop_text.push("c")
