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


def test_a_prefix_is_reused_after_a_second_turn_confirmed_it() -> None:
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


def test_the_prefix_is_not_reused_for_a_turn_with_a_new_image() -> None:
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


def test_the_prefix_is_not_reused_if_the_template_rewrites_earlier_turns() -> None:
    world = World()
    world.render(["a" * 90])
    turn = world.look(["a" * 90, "b"])
    world.memo.keep(turn, [Rendered(np.arange(400, dtype=np.int32))], "http://r")
    assert beginning(world.look(["a" * 90, "b", "c"]), world) is None


def test_entries_older_than_15_minutes_are_not_used() -> None:
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
def test_fields_that_may_change_a_prompt_give_separate_entries(other: dict[str, Any]) -> None:
    world = World()
    world.render(["a"])
    assert world.look(["a"], temperature=0.3, stream=True, max_tokens=9).whole is not None
    assert world.look(["a"], **other).whole is None


def test_images_by_url_are_not_kept_and_inline_ones_are() -> None:
    world = World()
    for url, keeps in (("http://h/a.png", False), ("data:image/png;base64,AAAA", True)):
        part = {"type": "image_url", "image_url": {"detail": "low", "url": url}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        turn = world.memo.look(*world.memo.keys_of(json.dumps(body).encode(), PATH, ""))
        assert turn.keeps is keeps


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b'{"messages": [}'])
def test_a_body_that_is_no_chat_has_no_entry(body: bytes) -> None:
    world = World()
    keys, sizes, keeps = world.memo.keys_of(body, PATH, "")
    assert not keys
    turn = world.memo.look(keys, sizes, keeps)
    world.memo.keep(turn, [Rendered(ids_of(["a"]))], "r")
    assert (turn.whole, turn.parent, world.memo.bytes) == (None, None, 0)


texts = st.lists(st.sampled_from(["", "a", "b", "c" * 50]), min_size=1, max_size=5)


@given(st.lists(st.tuples(texts, st.sampled_from(["", "t1"]), st.booleans()), max_size=40))
def test_a_reused_prefix_is_how_the_prompt_really_begins(
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
def test_the_common_prefix_of_two_id_lists_is_found(one: list[int], other: list[int]) -> None:
    same = same_ids(np.array(one, dtype=np.int32), np.array(other, dtype=np.int64))
    assert one[:same] == other[:same]
    assert same == min(len(one), len(other)) or one[same] != other[same]
