"""Tests of answers that contain the model name that the client asked for: only the name differs."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.http.framing import parse_head
from router.http.reply import ReplyHead
from router.names.answers import AnswerEditor, EventLines, with_model
from router.names.long_answers import LongAnswer

NAME = 'a "name"\\ of é'
VALUE = json.dumps(NAME).encode()
JSON = (b"Content-Type", b"application/json")

WORDS = st.sampled_from(["model", "mod", "message", "response", '"model":"x"', "\\", "é", "{", "a"])
LEAVES = st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=6)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=6)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def edit_pieces(
    editor: LongAnswer | EventLines | AnswerEditor, text: bytes, cuts: list[int]
) -> bytes:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = itertools.pairwise(places)
    return b"".join(editor.feed(text[a:b]) for a, b in pieces) + editor.flush()


def renamed(value: Any, inner: str | None = None) -> Any:
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("model"), str):
        value = value | {"model": NAME}
    if inner is not None and isinstance(value.get(inner), dict):
        value = value | {inner: renamed(value[inner])}
    return value


def only_names_differ(before: bytes, after: bytes) -> bool:
    """Return whether `after` is `before` with some of its strings replaced by the name."""
    parts = [re.escape(part) for part in after.split(VALUE)]
    return re.fullmatch(rb'"(?:[^"\\]|\\.)*"'.join(parts), before, re.DOTALL) is not None


@given(OBJECTS | VALUES, CUTS, st.sampled_from([None, 1]), st.booleans())
@example({"model": "m"}, [1, 3, 9, 10, 11, 12], None, True)
def test_the_model_is_renamed_in_json_cut_anywhere(value, cuts, indent, ascii_only) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    after = edit_pieces(LongAnswer(VALUE), text, cuts)
    assert json.loads(after) == renamed(json.loads(text))
    assert only_names_differ(text, after)
    if isinstance(value, dict):
        assert json.loads(with_model(text, VALUE)) == renamed(json.loads(text))


@given(st.lists(OBJECTS, max_size=4), CUTS, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_the_model_is_renamed_in_events_cut_anywhere(values, cuts, end, whole) -> None:
    lines = [f"event: x{end}data: {json.dumps(value)}{end}{end}" for value in values]
    text = "".join([f": ping{end}{end}", *lines, f"data: [DONE]{end}{end if whole else ''}"])
    after = edit_pieces(EventLines(VALUE, "message"), text.encode(), cuts).decode()
    expected = [line.split("data: ")[0] for line in lines]
    shown = [event.split("data: ") for event in after.split(f"{end}{end}")[1:-1]]
    assert [json.loads(data) for _, data in shown[: len(values)]] == [
        renamed(value, "message") for value in values
    ]
    assert [head for head, _ in shown[: len(values)]] == expected
    assert only_names_differ(text.encode(), after.encode())


@given(st.binary(max_size=60), CUTS)
def test_bytes_that_are_not_json_pass_unchanged(text, cuts) -> None:
    assert edit_pieces(EventLines(VALUE), text, cuts) == text
    if b"model" not in text:
        assert edit_pieces(LongAnswer(VALUE), text, cuts) == text


def test_text_that_looks_like_the_model_field_is_not_renamed() -> None:
    inner = r'"content":"\"model\":\"x\"","tool":{"model":"y"},"list":[{"model":"z"}]'
    text = ("{" + inner + ',"model" : "m"}').encode()
    expected = text.replace(b'"model" : "m"', b'"model" : ' + VALUE)
    assert edit_pieces(LongAnswer(VALUE), text, []) == expected
    assert edit_pieces(LongAnswer(VALUE), text, list(range(len(text)))) == expected
    assert (
        edit_pieces(EventLines(VALUE), b"data:" + text + b"\n\n", [])
        == b"data:" + expected + b"\n\n"
    )


@pytest.mark.parametrize("model", ["null", "7", "[1]", '{"model":"x"}'])
def test_a_model_field_that_is_not_a_string_is_not_renamed(model) -> None:
    text = f'{{"id":1,"model":{model}}}'.encode()
    assert edit_pieces(LongAnswer(VALUE), text, list(range(len(text)))) == text
    assert edit_pieces(EventLines(VALUE), b"data: %b\n\n" % text, []) == b"data: %b\n\n" % text


def test_a_long_answer_is_not_buffered() -> None:
    editor, row = (
        LongAnswer(VALUE),
        b'{"object":"embedding","embedding":[%b]}' % b",".join([b"0.25"] * 4_096),
    )
    out = [editor.feed(b'{"object":"list","data":[')]
    for _ in range(64):
        out.append(editor.feed(row + b","))
        assert len(editor._kept) < 100
    out.append(editor.feed(row + b'],"model":"m","usage":{}}'))
    whole = b"".join(out) + editor.flush()
    assert json.loads(whole)["model"] == NAME
    assert len(json.loads(whole)["data"]) == 65


def test_a_long_string_is_not_buffered() -> None:
    editor, sent = LongAnswer(VALUE), 0
    for piece in (b'{"data":"', *([b"A" * 65_536] * 20), b'","', *([b"k" * 65_536] * 3), b'":1}'):
        sent += len(editor.feed(piece)) - len(piece)
        assert -70_000 < sent <= 0
    assert sent == 0


def test_an_event_without_an_end_passes_unchanged() -> None:
    editor, kept = EventLines(VALUE), 0
    pieces = [b'data: {"model":"m","x":"', *([b"y" * 65_536] * 40), b'"}\n']
    out = []
    for piece in pieces:
        out.append(editor.feed(piece))
        kept = max(kept, editor._kept_bytes)
    assert b"".join(out) == b"".join(pieces)
    assert kept <= (1 << 20) + 65_536
    assert editor.feed(b'data: {"model":"m"}\n\n') == b'data: {"model":%b}\n\n' % VALUE


def head(*headers: tuple[bytes, bytes], status: int = 200, stream: bool = False) -> ReplyHead:
    """Return the head of a worker's reply as it is read from the wire."""
    lines = [b"HTTP/1.1 %d OK" % status, b"Transfer-Encoding: chunked"]
    lines += [b"%b: %b" % header for header in headers]
    lines += [b"Content-Type: text/event-stream"] if stream else []
    return parse_head(b"\r\n".join(lines) + b"\r\n", "POST")


@pytest.mark.parametrize(
    ("one", "edits"),
    [
        (head(JSON), True),
        (head((b"content-type", b"application/json; charset=utf-8")), True),
        (head((b"content-type", b"application/problem+json")), True),
        (head(JSON, status=404), False),
        (head(JSON, (b"Content-Encoding", b"gzip")), False),
        (head((b"content-type", b"text/html")), False),
        (head((b"content-type", b"application/jsonl")), False),
        (head(), False),
        (head((b"content-type", b"text/event-stream"), stream=True), True),
        (head((b"content-encoding", b"br"), stream=True), False),
    ],
)
def test_the_editor_edits_json_and_events_with_status_200(one, edits) -> None:
    assert AnswerEditor(VALUE).begin(one) == edits
