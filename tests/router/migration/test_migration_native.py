"""Tests of the native journal of streams against the Python one: both give the same bytes and
state, however a stream is split.
"""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvkernels
from router.engines.adapter import StreamForm
from router.migration.journal import Journal, Room
from router.migration.plan import Plan, plan_of
from tests.effort import examples
from tests.router.migration.migration_engines import Engine

pytestmark = pytest.mark.skipif(kvkernels.Relay is None, reason="no relay was built")

STREAM_TOKENS, TOKENS = 40, 50
HIDDEN = (b"", b"null")


def plan() -> Plan:
    made = plan_of(b'{"prompt":"x","stream_options":{"include_usage":true}}', "/v1/completions", 9)
    assert isinstance(made, Plan)
    return made


class Both:
    """Feeds one stream to the Python and the native journal. Lifetime: example."""

    def __init__(self, hidden: bytes) -> None:
        self.python_room = Room(STREAM_TOKENS, TOKENS)
        self.native_room = kvkernels.RelayRoom(STREAM_TOKENS, TOKENS)
        self.python = Journal(plan(), self.python_room)
        self.python.begin(StreamForm(hidden=hidden))
        terms = kvkernels.RelayJournalTerms(self.native_room, hidden, b"X: 1\r\n")
        self.native = kvkernels.RelayJournal(terms)
        self.outs = [b"", b""]

    def feed(self, data: bytes, cuts: list[int]) -> None:
        """Feed a reply in pieces, up to its end or to the point where the worker failed."""
        edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        for start, stop in itertools.pairwise(edges):
            self.outs[0] += self.python.feed(data[start:stop])
            self.outs[1] += self.native.feed(data[start:stop])
            self.check()
            if self.python.failure is not None:
                return
        self.outs[0] += self.python.flush()
        self.outs[1] += self.native.flush()
        self.check()
        assert self.outs[0] == self.outs[1]

    def check(self) -> None:
        """Check that both journals agree. An event that only Python can read may wait in the Python
        journal, or count there as its worker's failure.
        """
        python, native = self.python, self.native
        if native.unfit == "unreadable" and python.unfit != "unreadable":
            assert self.outs[1].startswith(self.outs[0])
            return
        assert self.outs[0] == self.outs[1]
        assert native.unfit == python.unfit
        if native.unfit:  # an event that only Python reads may end the answer
            assert native.finished <= python.finished
            assert native.usage_sent <= python._usage_sent
            assert native.complete == python.complete
            assert self.native_room.taken == self.python_room.taken == 0
            return
        assert native.failure == str(python.failure or "")
        assert native.prompt == python.prompt.tobytes()
        assert native.said == python.answer_ids.tobytes()
        assert self.native_room.taken == self.python_room.taken
        assert native.prefix == python._prefix
        ours = (native.finished, native.complete, native.miscounted, native.prompt_tokens)
        assert ours == (python.finished, python.complete, python.miscounted, python.prompt_tokens)
        assert (native.opened, native.usage_sent) == (python._opened, python._usage_sent)

    def end(self) -> None:
        del self.native
        assert self.native_room.taken == 0


TEXTS = st.sampled_from(["", "a", "\\u00e9", "\u00fc", '\\"', "x" * 30, '\\"token_ids\\":[1]'])
ID = st.one_of(st.integers(0, 9), st.sampled_from([2**31 - 1, 2**31, -1]))
_ODD_VALUES = rb"""
null [] {} 1 0 -0 1.0 1e2 true "x" "" [[]] nul "abort" "stop" "error" "\u0061bort" "\ud800"
{"code":404} {"code":500} {"code":1e3} {"code":true} {"code":null} {"code":-600} {"code":"x"}
{"completion_tokens":2} {"completion_tokens":2.5} {"completion_tokens":1,"completion_tokens":3}
{"content":"y"} {"role":"r","content":""} {"content":null,"tool_calls":[1]} {"content":5}
{"content":"a","x":null} {"content":"a","content":""} {"c\u006fntent":"a"} {"x":[]}
""".split()
VALUES: st.SearchStrategy[bytes] = st.one_of(
    st.sampled_from([*_ODD_VALUES, b"[ ]", b'"\xff"', b'{"a":"\xff"}']),
    TEXTS.map(lambda text: b'"%b"' % text.encode()),
    st.lists(ID, max_size=6).map(lambda ids: json.dumps(ids, separators=(",", ":")).encode()),
)
CHOICE_KEYS = ["index", "text", "delta", "finish_reason", "token_ids", "prompt_token_ids", "x"]
CHUNK_KEYS = ["id", "usage", "prompt_token_ids", "error"]


def json_object(fields: list[tuple[str, bytes]], blank: bool) -> bytes:
    comma = b", " if blank else b","
    return b"{" + comma.join(b'"%b":%b' % (k.encode(), v) for k, v in fields) + b"}"


@st.composite
def usual_events(draw: st.DrawFn) -> bytes:
    """Draw an event as engines write them."""
    text = draw(TEXTS).encode()
    ids = json.dumps(draw(st.lists(st.integers(0, 99), max_size=3)), separators=(",", ":"))
    prompt = draw(st.sampled_from([b"", b',"prompt_token_ids":null', b',"prompt_token_ids":[1,2]']))
    ends = draw(st.sampled_from([b"null", b"null", b"null", b'"stop"', b'"abort"']))
    said = draw(st.sampled_from([b'"text":"%b"', b'"delta":{"content":"%b"}'])) % text
    choice = b'{"index":0,%b,"finish_reason":%b,"token_ids":%b%b}' % (
        *(said, ends, ids.encode(), prompt),
    )
    return b'data: {"id":"a","choices":[%b]}\n\n' % choice


@st.composite
def unusual_events(draw: st.DrawFn) -> bytes:
    """Draw an event that has known keys with any values."""
    pairs = st.lists(st.tuples(st.sampled_from(CHOICE_KEYS), VALUES), max_size=5)
    choices = draw(st.lists(pairs, max_size=2))
    blank = draw(st.booleans())
    body = b"[" + b",".join(json_object(choice, blank) for choice in choices) + b"]"
    chunk = draw(st.lists(st.tuples(st.sampled_from(CHUNK_KEYS), VALUES), max_size=2))
    if draw(st.integers(0, 5)):
        chunk.insert(draw(st.integers(0, len(chunk))), ("choices", body))
    lead = draw(st.sampled_from([b"data: ", b"data:", b"data:\x0b", b"event: x\ndata: "]))
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b" \n\n", b"\n\r\n", b"\r\n\n"]))
    return lead + json_object(chunk, blank) + end


USAGE = b'data: {"id":"a","choices":[],"usage":{"completion_tokens":2}}\n\n'
LINES = st.sampled_from(
    [b": ping\n\n", b"data: [DONE]\n\n", b"\n\n", b"\r\n", b"data: {\n\n", USAGE]
)
EVENTS = st.lists(
    st.one_of(usual_events(), usual_events(), unusual_events(), LINES, st.binary(max_size=9)),
    max_size=12,
)
CUTS = st.lists(st.integers(0, 1 << 12), max_size=8)


@given(events=EVENTS, cuts=CUTS, hidden=st.sampled_from(HIDDEN))
@example([b'data: {"choices":[{"text":"","token_ids":[1]}]}\n\n'] * 300, [], b"")
@example([b"data: " + b"x" * (1 << 17) + b"\n\ndata: [DONE]\n\n"], [1 << 16, 99_999], b"null")
@settings(max_examples=examples(300))
def test_both_journals_read_a_stream_the_same(
    events: list[bytes], cuts: list[int], hidden: bytes
) -> None:
    both = Both(hidden)
    both.feed(b"".join(events), cuts)
    both.end()


@given(
    kind=st.sampled_from(["vllm", "warmroute"]),
    chat=st.booleans(),
    total=st.integers(1, 30),
    cuts=CUTS,
)
@settings(max_examples=examples(100))
def test_the_native_journal_understands_engines_streams(
    kind: str, chat: bool, total: int, cuts: list[int]
) -> None:
    body: dict[str, Any] = {"messages": []} if chat else {"prompt": "x"}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    both = Both(HIDDEN[kind == "vllm"])
    both.feed(b"".join(Engine(kind, "x").stream(body, [3, 1, 4], total)), cuts)
    assert both.native.unfit == ""
    assert list(array("i", both.native.prompt)) == [3, 1, 4]
    assert len(array("i", both.native.said)) == total
    assert both.native.complete
    assert both.native.leave_room() == total + 3
    assert both.native.leave_room() == 0
    both.native_room.give(total + 3)
    both.end()


def test_an_unusual_event_passes_and_its_stream_may_not_move() -> None:
    """An event that Python can read but no engine writes passes through the native journal without
    its token ids, and the stream may then no longer move to another worker.
    """
    both = Both(b"")
    event = b'data: {"choices":[{"t\\u0065xt":"a","token_ids":[1],"prompt_token_ids":[2]}]}\n\n'
    both.feed(event, [])
    assert (both.python.unfit, both.native.unfit) == ("", "unreadable")
    assert both.outs == [b'data: {"choices":[{"t\\u0065xt":"a"}]}\n\n'] * 2
