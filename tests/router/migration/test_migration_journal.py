"""Tests that a stream over several workers equals, byte for byte, the stream of a single worker."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.migration.journal import Journal, Room
from router.migration.plan import (
    Plan,
    plan_of,
    rest_of,
    tokens_left,
    with_return_token_ids,
)
from tests.effort import examples
from tests.router.migration.migration_engines import Engine
from tests.router.migration.migration_support import FORMS

PROMPT = [3, 1, 4, 1, 5]
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


def request(chat: bool, total: int, **fields: Any) -> dict[str, Any]:
    """Return a client's body for `total` tokens."""
    asked = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    return {"model": "m", **asked, "max_tokens": total, "stream": True, **fields}


def planned(body: dict[str, Any]) -> Plan:
    plan = plan_of(json.dumps(body).encode(), PATHS["messages" in body], body["max_tokens"])
    assert isinstance(plan, Plan), plan
    return plan


class Relay:
    """Carries one stream over several engines, all but the last of which die. Lifetime: example."""

    def __init__(self, body: dict[str, Any], kind: str) -> None:
        self.body = body
        self.kind = kind
        self.plan = planned(body)
        self.room = Room(10_000, 10_000)
        self.journal = Journal(self.plan, self.room)
        self.out = b""
        self.engines = 0

    def reply(self) -> bytes:
        """Return the whole reply of the next engine to the request for the rest of the answer."""
        journal, total = self.journal, self.body["max_tokens"]
        engine = Engine(self.kind, "x" * self.engines + "y")
        self.engines += 1
        form = FORMS[self.kind]
        journal.begin(form)
        said = len(journal.answer_ids)
        if not said:
            body = json.loads(with_return_token_ids(json.dumps(self.body).encode(), self.plan))
            return b"".join(engine.stream(body, PROMPT, total))
        left = tokens_left(self.plan, form, journal.prompt_tokens, said, None)
        assert left == total - said
        assert left is not None
        ids = [*journal.prompt, *journal.answer_ids]
        body = json.loads(rest_of(self.plan, ids, said, left))
        assert body["prompt"] == ids
        assert body["max_tokens"] == left
        return b"".join(engine.stream(body, ids, left))

    def feed(self, data: bytes, cuts: list[int]) -> None:
        """Give the journal of the stream one engine's bytes, cut at `cuts`."""
        edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        for start, stop in itertools.pairwise(edges):
            self.out += self.journal.feed(data[start:stop])

    def run(self, deaths: list[int], cuts: list[int]) -> bytes:
        """Return the client's bytes; each of `deaths` is the place in an engine's reply at which
        that engine dies.
        """
        for death in deaths:
            reply = self.reply()
            self.feed(reply[: death % (len(reply) + 1)], cuts)
            if self.journal.closable:
                self.out += self.journal.closing()
                return self.out
            self.journal.seam()
        self.feed(self.reply(), cuts)
        self.out += self.journal.flush()
        return self.out


POSITIONS = st.integers(0, 1 << 16)


@given(
    chat=st.booleans(),
    kind=st.sampled_from(["vllm", "warmroute"]),
    total=st.integers(1, 12),
    usage=st.booleans(),
    ids=st.booleans(),
    deaths=st.lists(POSITIONS, max_size=4),
    cuts=st.lists(POSITIONS, max_size=6),
)
@settings(max_examples=examples(300))
def test_a_moved_stream_equals_the_undisturbed_one(
    chat: bool,
    kind: str,
    total: int,
    usage: bool,
    ids: bool,
    deaths: list[int],
    cuts: list[int],
) -> None:
    body = request(chat, total)
    if usage:
        body["stream_options"] = {"include_usage": True}
    if ids:
        body["return_token_ids"] = True
    relay = Relay(body, kind)
    first_that_spoke = relay.run(deaths, cuts)
    assert not relay.journal.unfit
    whole = b"".join(Engine(kind, _name_in(first_that_spoke)).stream(body, PROMPT, total))
    assert first_that_spoke == whole
    relay.journal.close()
    assert relay.room.taken == 0


def _name_in(stream: bytes) -> str:
    return str(json.loads(stream.split(b"\n\n")[0][6:])["id"]).partition("-")[2]


@pytest.mark.parametrize("chat", [True, False])
def test_a_worker_may_die_after_any_byte(chat: bool) -> None:
    body = request(chat, 9, stream_options={"include_usage": True})
    length = len(Relay(body, "vllm").reply())
    for death in range(length + 1):
        relay = Relay(body, "vllm")
        said = relay.run([death], [])
        engine = Engine("vllm", _name_in(said))
        assert said == b"".join(engine.stream(body, PROMPT, 9)), f"died after {death} bytes"


def test_an_unmoved_stream_keeps_its_comments_and_unknown_fields() -> None:
    relay = Relay(request(False, 2), "warmroute")
    event = (
        b'data: {"id":"a","x":[1],"choices":[{"index":0,"text":"a","token_ids":[7],"y":{}}]}\n\n'
    )
    first = event.replace(b'"token_ids"', b'"prompt_token_ids":[1,2],"token_ids"')
    relay.feed(b": ping\r\n\r\n" + first + b"\n\n" + event, [3, 12, 13, 50])
    cleaned = event.replace(b',"token_ids":[7]', b"")
    assert relay.out == b": ping\r\n\r\n" + cleaned + b"\n\n" + cleaned
    assert list(relay.journal.answer_ids) == [7, 7]
    assert list(relay.journal.prompt) == [1, 2]


EVENT = {"id": "a", "choices": [{"index": 0, "text": "a", "token_ids": [7]}]}


def event_of(**fields: Any) -> bytes:
    choice = {"index": 0, "text": "a", "token_ids": [7], "prompt_token_ids": [1]} | fields
    data = {"id": "a", "choices": [choice]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (b"data: {not json}\n\n", "unreadable"),
        (b"event: x\ndata: {}\n\n", "unreadable"),
        (b'data: {"object":"x"}\n\ndata: {"id":"a"}\n\n', "unreadable"),
        (event_of(token_ids=None), "no_token_ids"),
        (event_of(prompt_token_ids=None), "no_token_ids"),
        (event_of(index=1), "several_choices"),
        (event_of(text=None, delta={"content": None, "reasoning": "hm"}), "parsed"),
        (event_of(text=None, delta={"tool_calls": [{"index": 0}]}), "parsed"),
        (event_of(text="", token_ids=[1] * 300), "withheld"),
        (event_of(token_ids=[1] * 60_000), "room"),
        (event_of(token_ids=[2**40]), "unreadable"),
        (event_of(token_ids="x"), "unreadable"),
    ],
)
def test_an_event_that_prevents_a_move_passes_and_its_reason_is_kept(
    event: bytes, why: str
) -> None:
    journal = Journal(planned(request(False, 5, return_token_ids=True)), room := Room(10_000, 100))
    journal.begin(FORMS["vllm"])
    out = journal.feed(event) + journal.flush()
    assert journal.unfit == why
    assert out == event
    assert room.taken == 0


def test_an_event_without_an_end_passes_through() -> None:
    journal = Journal(planned(request(False, 5)), Room(1, 1))
    data = b"data: " + b"x" * (1 << 17)
    assert journal.feed(data) + journal.feed(b"y") + journal.flush() == data + b"y"
    assert journal.unfit == "long_event"


def test_an_engine_error_is_a_failure_and_a_client_error_is_not() -> None:
    for code, is_failure in ((500, True), (None, True), (400, False)):
        journal = Journal(planned(request(False, 5)), Room(99, 99))
        journal.begin(FORMS["vllm"])
        journal.feed(event_of())
        error = json.dumps({"error": {"message": "no", "code": code}}).encode()
        out = journal.feed(b"data: " + error + b"\n\ndata: [DONE]\n\n")
        assert (journal.failure is not None) == is_failure
        assert (b"error" in out) != is_failure


def test_an_answer_aborted_by_its_engine_is_a_failure() -> None:
    journal = Journal(planned(request(False, 5)), Room(99, 99))
    journal.begin(FORMS["vllm"])
    assert journal.feed(event_of()) != b""
    assert journal.feed(event_of(finish_reason="abort", text="")) == b""
    assert journal.failure is not None
    assert journal.failure.kind == "early_close"
