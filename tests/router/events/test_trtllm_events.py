"""Tests of the reader of TensorRT-LLM's answers: no answer makes it fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.events import BlockRemoved, BlockStored, WireError, encode_batch
from kvkernels import EventBatch
from router.events.trtllm import PolledEvent, Windows, read_answer, wire_events
from tests.effort import examples


def read(data: Any, **fields: Any) -> PolledEvent | WireError:
    (event,) = read_answer(json.dumps([{"event_id": 0, "data": data, **fields}]).encode())
    return event


def events_of(data: Any) -> list[Any]:
    event = read(data)
    assert isinstance(event, PolledEvent)
    return wire_events(event)[0]


def block(name: Any, *tokens: Any, **fields: Any) -> dict[str, Any]:
    return {"block_hash": name, "tokens": [{"token_id": t} for t in tokens], **fields}


def stored(parent: Any, *blocks: Any) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def test_consecutive_blocks_make_one_event_per_size_and_cache_level() -> None:
    data = stored(
        "0xff", block(1, 5, 6), block(2, 7, 8), block(3, 9, 9, cache_level=1), block(4, 1)
    )
    assert events_of(data) == [
        BlockStored((1, 2), 255, (5, 6, 7, 8), 2, medium="GPU"),
        BlockStored((3,), 2, (9, 9), 2, medium="CPU"),
        BlockStored((4,), 3, (1,), 1, medium="GPU"),
    ]


def test_only_the_first_block_of_a_prompt_has_its_salt() -> None:
    (first,) = events_of(stored(None, block(1, 5, cache_salt="blue")))
    (later,) = events_of(stored(1, block(2, 5, cache_salt="blue")))
    assert (first.cache_salt, later.cache_salt) == ("blue", None)


def test_images_become_extra_keys_of_their_block() -> None:
    image = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 7}
    (event,) = events_of(stored(None, block(1, 5), block(2, 6, mm_keys=[image])))
    assert event.extra_keys == [None, [["ab" * 32, 7]]]


def test_a_removal_applies_to_every_cache_level() -> None:
    digits = "ab" * 24 + f"{2**63:016x}"
    events = events_of({"type": "removed", "block_hashes": [1, digits]})
    assert events == [BlockRemoved((1, 2**63), medium) for medium in ("GPU", "CPU", "DISK")]


def test_priority_and_creation_events_change_no_block() -> None:
    assert events_of({"type": "created", "num_blocks_per_cache_level": [5, 5]}) == []
    assert events_of({"type": "updated", "block_hash": 1, "priority": {"new_value": 3}}) == []
    same = {"old_value": 1, "new_value": 1}
    assert events_of({"type": "updated", "block_hash": 1, "cache_level": same}) == []


def test_only_events_of_the_largest_window_seen_count() -> None:
    windows, shown = Windows(), []
    for tokens in (512, None, 4096, 512, 4096, None):
        event = read({"type": "created"}, window_size=tokens)
        assert isinstance(event, PolledEvent)
        shown.append(windows.counts(event))
    assert shown == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"type": "exploded"},
        {"type": "stored"},
        stored(None, {"block_hash": 1}),
        stored(None, block("xyz", 1)),
        stored(None, block("a" * 65, 1)),
        stored(None, block(1.5, 1)),
        stored(None, block(1, 1, cache_level=3)),
        stored(None, block(1, None)),
        {"type": "removed", "block_hashes": 5},
        {"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0}},
    ],
)
def test_an_invalid_event_is_an_error_and_the_next_one_is_read(data: Any) -> None:
    good = {"event_id": 1, "data": {"type": "created"}}
    answer = json.dumps([{"event_id": 0, "data": data}, good]).encode()
    wrong, right = read_answer(answer)
    assert isinstance(wrong, WireError)
    assert isinstance(right, PolledEvent)
    assert right.number == 1


@pytest.mark.parametrize("fields", [{"event_id": -1}, {"event_id": 2**63}, {"event_id": "1"}])
def test_out_of_range_numbers_are_refused(fields: dict[str, Any]) -> None:
    assert isinstance(read({"type": "created"}, **fields), WireError)


@pytest.mark.parametrize("body", [b"", b"{}", b"[", b"\xff", b"[" * 50_000, b"null"])
def test_an_answer_that_is_not_an_array_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        list(read_answer(body))


names = st.one_of(st.integers(-5, 2**64), st.text("0123456789abcdefx", max_size=66), st.none())
tokens = st.one_of(st.integers(-2, 2**33), st.text(max_size=3), st.none())
blocks = st.fixed_dictionaries(
    {"block_hash": names, "tokens": st.lists(st.fixed_dictionaries({"token_id": tokens}))},
    optional={
        "cache_level": st.integers(-1, 4),
        "cache_salt": st.one_of(st.none(), st.text(max_size=3)),
        "mm_keys": st.lists(st.fixed_dictionaries({"hash": st.text(max_size=5)}), max_size=2),
    },
)
datas = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("stored"), "parent_hash": names, "blocks": st.lists(blocks, max_size=4)}
    ),
    st.fixed_dictionaries({"type": st.just("removed"), "block_hashes": st.lists(names)}),
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(datas, max_size=4))
def test_any_answer_is_an_error_or_a_batch(several: list[Any]) -> None:
    """Any answer that can be read makes a batch of events, unless a token is invalid; any other is
    an error.
    """
    numbered = [{"event_id": n, "data": data} for n, data in enumerate(several)]
    for event in read_answer(json.dumps(numbered).encode()):
        if isinstance(event, WireError):
            continue
        made, skipped = wire_events(event)
        payload = encode_batch(0.0, made)
        if all(0 <= t < 2**31 for e in made if isinstance(e, BlockStored) for t in e.tokens):
            assert len(EventBatch(payload)) == len(made)
        else:
            with pytest.raises(ValueError, match="token"):
                EventBatch(payload)
        assert skipped in (0, 1)
