"""Tests of which replies with status 200 count as answers, in whatever pieces they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkernels import AnswerDue, AnswerJudge, late_failure
from tests.oracles.answers import judged
from tests.router.http.answer_bodies import (
    BAD_STREAMS,
    BAD_WHOLE,
    CLIENTS,
    ERROR,
    GOOD_STREAMS,
    GOOD_WHOLE,
    OTHER_FORMS,
    case_id,
    chunk,
    events,
    text,
    usage,
)
from tests.router.property_support import cut, patient

LIMIT = 65_536
FORMS = ("completions", "responses", "messages", "generate", "other")


def read(
    pieces: list[bytes],
    form: str,
    *,
    tokens: bool = True,
    stream: bool = False,
    coded: bool = False,
) -> tuple[str, bool]:
    """Read the pieces with the native reader; return why the body is no answer, and whether it is a
    refusal.
    """
    judge = AnswerJudge(AnswerDue(form, tokens), stream, coded, LIMIT)
    for number, piece in enumerate(pieces):
        if judge.feed(piece, number == len(pieces) - 1):
            break
    assert judge.answers == (not judge.failure)
    return judge.failure, judge.refuses


@pytest.mark.parametrize(("name", "body"), GOOD_STREAMS, ids=case_id)
def test_short_streams_are_answers(name: str, body: bytes) -> None:
    refuses = name == "clients_fault"
    assert read([body], "completions", stream=True) == ("", refuses)
    assert read([body], "completions") == ("", refuses), "under another content type"
    assert read([bytes([byte]) for byte in body[:2_000]] + [body[2_000:]], "completions") == (
        "",
        refuses,
    )


@pytest.mark.parametrize(("name", "body"), GOOD_WHOLE, ids=case_id)
def test_short_bodies_are_answers(name: str, body: bytes) -> None:
    assert read([body], "completions") == ("", name == "clients_fault")


@pytest.mark.parametrize(("name", "body"), BAD_STREAMS, ids=case_id)
def test_streams_without_content_are_not_answers(name: str, body: bytes) -> None:
    why, refuses = read([body], "completions", stream=True)
    assert why
    assert not refuses
    in_bytes = [bytes([byte]) for byte in body] or [b""]
    assert read(in_bytes, "completions", stream=True) == (why, False)


@pytest.mark.parametrize(("name", "body"), BAD_WHOLE, ids=case_id)
def test_bodies_without_content_are_not_answers(name: str, body: bytes) -> None:
    assert read([body], "completions")[0]


@pytest.mark.parametrize(("form", "body", "answers"), OTHER_FORMS, ids=case_id)
@pytest.mark.parametrize("stream", [False, True])
def test_forms_of_other_apis_are_judged(
    form: str, body: bytes, answers: bool, stream: bool
) -> None:
    assert (not read([body], form, stream=stream and body.startswith((b"data", b"event")))[0]) == (
        answers
    )


def test_an_empty_answer_counts_if_the_request_wants_no_tokens() -> None:
    for body in (events(text("", "length", **usage(0))), events(), events(chunk({}))):
        assert read([body], "completions", tokens=False, stream=True) == ("", False)
    whole = json.dumps(text("", "length", **usage(0))).encode()
    assert read([whole], "completions", tokens=False) == ("", False)
    for bad in (b"", b"<html>", json.dumps(ERROR).encode(), events(ERROR)):
        assert read([bad], "completions", tokens=False)[0]


def test_a_compressed_body_is_an_answer_unless_it_is_empty() -> None:
    assert read([b"\x1f\x8b"], "completions", coded=True) == ("", False)
    assert read([b""], "completions", coded=True) == ("has no body", False)


def test_a_triton_stream_may_have_no_response() -> None:
    assert read([b""], "other", stream=True) == ("", False)
    assert read([b""], "other") == ("has no body", False)


def test_an_unknown_answer_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="no form of answers: x"):
        AnswerDue("x")


def test_keep_alive_events_are_recognized_as_pings() -> None:
    for body, pings in (
        (b": ping\n\n", True),
        (b'event: ping\ndata: {"type": "ping"}\n\n', True),
        (events(chunk({"role": "assistant"}), done=False), False),
        (events(chunk({"role": "assistant"}), chunk({}), done=False), True),
        (b" \n", True),
    ):
        judge = AnswerJudge(AnswerDue("completions"), body[:1] != b" ", False, LIMIT)
        assert not judge.feed(body, False)
        assert judge.pings == pings, body


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (events(text("x"), text("", "stop"), {"choices": [], **usage(1)}), ""),
        (events(text("x"), ERROR), "is an error"),
        (events(text("x"), ERROR, done=False), "is an error"),
        (events(text("x"), {"id": "0" * 40, **ERROR}), "is an error"),
        (events(text("x"), ERROR, end="\r\n\r\n"), "is an error"),
        (
            b'x\n\ndata: {"type":"response.failed","response":{"status":"failed"}}\n\n',
            "is an error",
        ),
        (
            b'\ndata: {"text":"x","meta_info":{"finish_reason":{"type":"abort"}}}\n\n',
            "was given up by the engine",
        ),
        (b'\ndata: {"text":"x","meta_info":{"finish_reason":{"type":"stop"}}}\n\n', ""),
        (events(text("x"), CLIENTS), ""),
        (
            events(text("x"), text("", "abort"), {"choices": [], **usage(1)}),
            "was given up by the engine",
        ),
        (events(text('"error" abort'), text("", "stop")), ""),
        (events(text("x"), text("", "stop", error=None)), ""),
        (
            b'x\n\nevent: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n',
            "is an error",
        ),
        (b"", ""),
        (b"no events", ""),
        (b"x\ndata: error", ""),
    ],
)
def test_the_failure_at_the_end_of_a_stream_is_recognized(tail: bytes, why: str) -> None:
    assert late_failure(b"x\n" + tail) == why


WORD = st.sampled_from(
    ["", "x", "stop", "abort", "error", "assistant", "message", "tool_use", "length", "text"]
)
NAME = st.sampled_from(
    [
        *("choices", "text", "delta", "message", "finish_reason", "usage", "completion_tokens"),
        *("error", "code", "type", "status_code", "object", "role", "content", "output", "item"),
        *("response", "status", "meta_info", "stop_reason", "output_tokens", "index", "tool_calls"),
    ]
)
LEAF = st.one_of(
    *(st.none(), st.booleans(), WORD, st.integers(0, 600)),
    st.sampled_from(["response.completed", "response.created", "message_start", "message_stop"]),
    st.sampled_from(["invalid_request_error", "in_progress", "failed", "ping", "429", "400"]),
)
VALUE: st.SearchStrategy[Any] = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAME, inner, max_size=4)),
    max_leaves=12,
)
CHOICES = st.lists(st.dictionaries(NAME, VALUE, max_size=3), max_size=2)
ANSWER = st.one_of(
    st.dictionaries(NAME, VALUE, max_size=5),
    st.fixed_dictionaries({"choices": CHOICES}, optional={"usage": VALUE, "error": VALUE}),
)
LINE_END = st.sampled_from(["\n", "\r\n", "\r"])


@patient
@given(
    said=st.lists(ANSWER, max_size=4),
    form=st.sampled_from(FORMS),
    tokens=st.booleans(),
    end=LINE_END,
    extra=st.sampled_from(["", ": ping", "event: error", "id: 1", "event: ping"]),
    done=st.booleans(),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_streams_are_judged_as_by_the_oracle(
    said: list[Any], form: str, tokens: bool, end: str, extra: str, done: bool, cuts: list[int]
) -> None:
    lines = [f"{extra}{end}" if extra else ""]
    lines += [f"data: {json.dumps(one)}{end}{end}" for one in said]
    body = "".join([*lines, f"data: [DONE]{end}{end}" if done else ""]).encode()
    expected = judged(body, form, tokens, event_stream=True)
    assert read(cut(body, cuts) or [b""], form, tokens=tokens, stream=True) == expected


@patient
@given(
    said=st.one_of(ANSWER, st.lists(ANSWER, min_size=1, max_size=3)),
    form=st.sampled_from(FORMS),
    tokens=st.booleans(),
    cuts=st.lists(st.integers(0, 10_000), max_size=4),
)
def test_bodies_are_judged_as_by_the_oracle(
    said: Any, form: str, tokens: bool, cuts: list[int]
) -> None:
    body = json.dumps(said).encode()
    assert read(cut(body, cuts), form, tokens=tokens) == judged(body, form, tokens)
