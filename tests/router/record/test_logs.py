"""Tests of the router's own log as text and as JSON lines."""

from __future__ import annotations

import json
import logging
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.logs import JsonLines, TextLines, about
from tests.effort import examples

NAMED = ("mine", "ab" * 16)


def record(
    message: str, *of: object, named: tuple[str, str] = ("", ""), error: bool = False
) -> logging.LogRecord:
    exc_info = sys.exc_info() if error else None
    one = logging.LogRecord("router.x", logging.WARNING, "f", 1, message, of, exc_info)
    one.created = 1_700_000_000.25
    for name, value in about(*named).items():
        setattr(one, name, value)
    return one


def test_a_json_line_has_its_fields() -> None:
    line = json.loads(JsonLines().format(record("worker %d failed", 3, named=NAMED)))
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "router.x",
        "message": "worker 3 failed",
        "request": "mine",
        "trace": "ab" * 16,
    }
    assert set(json.loads(JsonLines().format(record("x")))) == {
        *("time", "level", "logger"),
        "message",
    }


def test_a_text_line_ends_with_the_ids() -> None:
    text = TextLines("%(levelname)s %(message)s")
    assert (
        text.format(record("x %d", 1, named=NAMED))
        == f"WARNING x 1 [request=mine trace={'ab' * 16}]"
    )
    assert text.format(record("x")) == "WARNING x"


def test_a_traceback_stays_on_one_line_and_is_bounded() -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        raise ValueError("y" * 50_000)

    try:
        deep(3)
    except ValueError:
        said = JsonLines().format(record("broke", error=True))
    assert "\n" not in said
    assert len(said) < 40_000
    assert json.loads(said)["exception"].endswith("y" * 100)


@settings(max_examples=examples(100))
@given(st.text(st.characters(), max_size=200), st.integers(0, 400))
def test_any_message_is_one_line_that_parses_back(text: str, times: int) -> None:
    message = text * times
    said = JsonLines().format(record("%s", message))
    assert "\n" not in said
    assert len(said) < 8_192 * 6 + 300
    read = json.loads(said)["message"]
    assert read == message[:8_192].encode("utf-8", "replace").decode()
