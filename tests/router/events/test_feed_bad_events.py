"""Tests of unusable events over real sockets: no other event is lost, and a replay stays
available.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.router.core.core_world import BLOCK, stored
from tests.router.events.feed_support import feed_line, until

GOOD = {"type": "BlockStored", "block_size": BLOCK, "medium": "GPU"}


def store_event(block: int) -> dict[str, Any]:
    event = stored([block])
    told = {"block_hashes": list(event.hashes), "parent_block_hash": event.parent}
    return GOOD | told | {"token_ids": list(event.tokens)}


IDS = list(range(BLOCK))
BAD: dict[str, tuple[Any, str]] = {
    "size 0 of unknown blocks": (
        GOOD | {"block_hashes": [99], "token_ids": [], "block_size": 0},
        "unknown_names",
    ),
    "negative id": (GOOD | {"block_hashes": [99], "token_ids": [-1, *IDS[1:]]}, "bad_tokens"),
    "id as float": (GOOD | {"block_hashes": [99], "token_ids": [1.0, *IDS[1:]]}, "bad_tokens"),
    "id as text": (GOOD | {"block_hashes": [99], "token_ids": ["1", *IDS[1:]]}, "bad_tokens"),
    "id null": (GOOD | {"block_hashes": [99], "token_ids": [None, *IDS[1:]]}, "bad_tokens"),
    "half a block": (GOOD | {"block_hashes": [99], "token_ids": IDS[1:]}, "token_count"),
    "too few names": (GOOD | {"block_hashes": [], "token_ids": IDS}, "token_count"),
    "unknown type": (GOOD | {"type": "BlockMoved", "block_hashes": [99]}, "unknown_type"),
    "no fields": (["BlockStored"], "bad_hashes"),
    "both forms": (["BlockStored", store_event(99)], "bad_hashes"),
    "name as text": (GOOD | {"block_hashes": ["99"], "token_ids": IDS}, "bad_hashes"),
    "junk": ([[[[{}]]], {1: [2.5]}, b""], "unknown_type"),
    "no event": (7, "unknown_type"),
    "medium as list": (store_event(99) | {"medium": ["GPU"]}, "unknown_medium"),
    "medium unknown": (store_event(99) | {"medium": "TAPE"}, "unknown_medium"),
    "adapter as map": (store_event(99) | {"lora_name": {"a": 1}}, "bad_field"),
    "absurd size": (store_event(99) | {"block_size": 10**12}, "bad_block_size"),
    "negative size": (store_event(99) | {"block_size": -BLOCK}, "bad_block_size"),
    "removal without names": ({"type": "BlockRemoved", "medium": "GPU"}, "bad_hashes"),
    "no UTF-8": (store_event(99) | {"lora_name": "XYZ"}, "bad_field"),
}
WIDE = GOOD | {"block_hashes": [98], "token_ids": [2**62 + 10**6] * BLOCK}


def batch(bad: Any) -> bytes:
    """Return a batch of twenty events, the tenth of which is `bad`."""
    events = [store_event(block) for block in range(100, 119)]
    events.insert(9, bad)
    return msgspec.msgpack.encode([0.0, events, 0]).replace(b"XYZ", b"X\xffZ")


@pytest.mark.parametrize("name", sorted(BAD))
async def test_a_bad_event_costs_no_other_event(name: str) -> None:
    bad, why = BAD[name]
    async with feed_line() as one:
        await one.subscribed()
        await one.settled()
        held, replays = one.kv.resident_blocks, len(one.publisher.replays)
        one.publisher.others[one.publisher.next_seq] = batch(bad)
        await one.publisher.publish()
        await one.publisher.publish()
        last = one.publisher.next_seq - 1
        await until(lambda: one.holds(last), "the batch behind it")
        assert one.kv.known
        assert one.holds(*range(100, 119))
        assert one.kv.resident_blocks == held + 20
        assert not one.kv.resyncing
        counts = one.feed.counters.skips + one.kv.skips()
        assert counts == {why: 1}
        assert one.feed.counters.malformed_frames == 0
        await asyncio.sleep(0)
        assert len(one.publisher.replays) <= replays + 1  # the one after the subscription


async def test_each_unknown_medium_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    media = ["TAPE", "TAPE", *(f"TIER{i}" for i in range(12)), "GPU"]
    async with feed_line() as one:
        await one.subscribed()
        await one.settled()
        held, seq = one.kv.resident_blocks, one.publisher.next_seq
        events = [store_event(99 + i) | {"medium": medium} for i, medium in enumerate(media)]
        for payload in (events, [store_event(98) | {"medium": "TIER9"}]):
            one.publisher.others[seq] = msgspec.msgpack.encode([0.0, payload, 0])
            seq += 1
            await one.publisher.publish()
        await until(lambda: one.kv.skips() or one.feed.counters.skips.total() == 15, "all")
        await until(lambda: one.kv.resident_blocks == held + 1, "the one in the GPU")
        names = [f"TIER{i}" for i in range(7)]
        assert one.feed.counters.unknown_media == {"TAPE": 2, **dict.fromkeys(names, 1), "": 6}
        assert caplog.text.count("tell of an unknown medium") == 8


async def test_wide_image_ids_are_hashed_and_the_batch_is_complete() -> None:
    async with feed_line() as one:
        await one.subscribed()
        await one.settled()
        held = one.kv.resident_blocks
        one.publisher.others[one.publisher.next_seq] = batch(WIDE)
        await one.publisher.publish()
        await until(lambda: one.kv.resident_blocks == held + 20, "all twenty")
        assert one.kv.known
        assert not one.feed.counters.skips + one.kv.skips()


async def test_an_unreadable_batch_is_skipped_after_one_replay() -> None:
    """A batch that cannot be read is skipped after one replay: the known blocks stay as a lower
    bound, and the batch is not requested again and again.
    """
    async with feed_line() as one:
        await one.subscribed()
        await one.settled()
        held, bad = one.kv.resident_blocks, one.publisher.next_seq
        one.publisher.others[bad] = batch(WIDE)[:-7]
        for _ in range(3):
            await one.publisher.publish()
        await until(lambda: one.kv.next_seq == bad + 3, "the batches behind it")
        assert one.kv.resident_blocks == held + 2
        assert one.holds(0, bad + 1, bad + 2)
        assert not one.kv.known
        await until(lambda: not one.kv.resyncing, "the replay's end")
        replays = len(one.publisher.replays)
        await one.publisher.publish()
        await until(lambda: one.kv.next_seq == bad + 4, "one more")
        assert len(one.publisher.replays) == replays
        assert one.feed.counters.malformed_frames == 2
