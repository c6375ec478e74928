"""Tests of the memo of rendered prompts: which entries it uses, which it keeps apart, and how many
it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.render_way import Rendered
from router.tokens.turns import KnownTurn, TurnMemo, same_ids

PATH = "/v1/chat/completions"
DAY_S = 1_700_000_100.0  # within a quarter of an hour


class World:
    """A memo of rendered prompts, its clock, and a template that writes each message and then the
    start of an answer.
    """

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.now_s = DAY_S
        self.memo = TurnMemo(max_bytes, lambda: self.now_s)

    def body(self, messages: Sequence[Any], **fields: Any) -> bytes:
        chat = [{"role": "user", "content": text} for text in messages]
        return json.dumps({"model": "m", "messages": chat} | fields).encode()

    def look(self, messages: Sequence[Any], name: str = "", **fields: Any) -> KnownTurn:
        return self.memo.look(*self.memo.keys_of(self.body(messages, **fields), PATH, name))

    def render(self, messages: list[str], name: str = "", **fields: Any) -> Rendered:
        turn = self.look(messages, name, **fields)
        rendered = Rendered(ids_of(messages))
        self.memo.keep(turn, [rendered], "http://r")
        return rendered


def ids_of(messages: list[str]) -> Any:
    ids = [1]
    for text in messages:
        ids += [2, *text.encode(), 3]
    return np.array([*ids, 4], dtype=np.int32)


def beginning(turn: KnownTurn, world: World) -> list[int] | None:
    found = turn.beginning(world.memo.quarter)
    return None if found is None else found.ids.tolist()


def test_a_beginning_is_believed_after_a_turn_has_shown_that_it_stays() -> None:
    world = World()
    world.render(["a" * 90])
    assert world.look(["a" * 90]).whole is not None
    second = world.look(["a" * 90, "b"])
    assert second.whole is None
    assert beginning(second, world) is None
    world.render(["a" * 90, "b"])
    third = world.look(["a" * 90, "b", "c" * 8])
    assert beginning(third, world) == ids_of(["a" * 90, "b"]).tolist()[:-1]
    assert third.rest_bytes > 8


def test_how_many_tokens_a_new_image_has_is_not_guessed() -> None:
    world = World()
    world.render(["a" * 90])
    world.render(["a" * 90, "b"])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900}}
    for content, known in (([image], False), ([{"type": "text", "text": "c"}], True)):
        turn = world.look(["a" * 90, "b", content])
        assert turn.parent is not None
        assert (beginning(turn, world) is not None) is known
        assert turn.has_media is not known
    tool = {"type": "function", "function": {"parameters": {"type": "object"}}}
    assert not world.look(["a"], tools=[tool]).has_media


def test_a_template_that_rewrites_earlier_turns_is_not_believed() -> None:
    world = World()
    world.render(["a" * 90])
    turn = world.look(["a" * 90, "b"])
    world.memo.keep(turn, [Rendered(np.arange(400, dtype=np.int32))], "http://r")
    assert beginning(world.look(["a" * 90, "b", "c"]), world) is None


def test_nothing_is_used_beyond_its_quarter_of_an_hour() -> None:
    world = World()
    world.render(["a"])
    world.render(["a", "b"])
    assert beginning(world.look(["a", "b", "c"]), world) is not None
    world.now_s += 900
    assert world.look(["a", "b"]).whole is None
    assert beginning(world.look(["a", "b", "c"]), world) is None
    world.render(["a", "b", "c"])  # its beginning is compared with that of before all the same
    assert beginning(world.look(["a", "b", "c", "d"]), world) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"name": "salt x"},
        {"tools": [{"type": "function"}]},
        {"reasoning_effort": "high"},
        {"an_unknown_field": 1},
        {"model": "other"},
    ],
)
def test_what_may_change_a_prompt_keeps_requests_apart(other: dict[str, Any]) -> None:
    world = World()
    world.render(["a"])
    assert world.look(["a"], temperature=0.3, stream=True, max_tokens=9).whole is not None
    assert world.look(["a"], **other).whole is None


def test_images_by_address_are_not_kept_and_those_within_the_request_are() -> None:
    world = World()
    for url, keeps in (("http://h/a.png", False), ("data:image/png;base64,AAAA", True)):
        part = {"type": "image_url", "image_url": {"detail": "low", "url": url}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        turn = world.memo.look(*world.memo.keys_of(json.dumps(body).encode(), PATH, ""))
        assert turn.keeps is keeps


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b'{"messages": [}'])
def test_what_is_no_chat_is_not_known(body: bytes) -> None:
    world = World()
    keys, sizes, keeps = world.memo.keys_of(body, PATH, "")
    assert not keys
    turn = world.memo.look(keys, sizes, keeps)
    world.memo.keep(turn, [Rendered(ids_of(["a"]))], "r")
    assert (turn.whole, turn.parent, world.memo.bytes) == (None, None, 0)


texts = st.lists(st.sampled_from(["", "a", "b", "c" * 50]), min_size=1, max_size=5)


@given(st.lists(st.tuples(texts, st.sampled_from(["", "t1"]), st.booleans()), max_size=40))
def test_what_is_believed_is_how_the_prompt_begins(
    asked: list[tuple[list[str], str, bool]],
) -> None:
    """A beginning that the memo gives is how the prompt really begins, for any requests in any
    order, even if the memo has no room for all of them.
    """
    world = World(max_bytes=8_000)
    for messages, name, later in asked:
        world.now_s += 901 if later else 1
        turn = world.look(messages, name)
        ids = ids_of(messages).tolist()
        if turn.whole is not None:
            assert turn.whole.rendered[0].ids.tolist() == ids
        known = beginning(turn, world)
        if known is not None:
            assert ids[: len(known)] == known
        world.render(messages, name)
        assert 0 < world.memo.bytes <= 8_000


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_beginnings(one: list[int], other: list[int]) -> None:
    same = same_ids(np.array(one, dtype=np.int32), np.array(other, dtype=np.int64))
    assert one[:same] == other[:same]
    assert same == min(len(one), len(other)) or one[same] != other[same]
