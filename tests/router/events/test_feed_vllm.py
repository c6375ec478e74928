"""Tests of vLLM's events over real sockets, in every form from 0.9.2 to 0.33: bytes in, index out.

The two test vectors are those of vLLM 0.20 and 0.24 for two blocks of two tokens stored without a
parent, the first one removed, and a clear. Field orders: vLLM `distributed/kv_events.py` of each
release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.events.feed_wire import (
    chain_of,
    followed_publisher,
    pack,
    publisher,
    rig,
    seed_of,
    source_of,
    until,
)

ARRAYS_020 = bytes.fromhex(
    "93cb3ff8000000000000939aab426c6f636b53746f726564920b0cc0940102030402c0a3475055c0c00094ac426c6f"
    "636b52656d6f766564910ba34750550091b0416c6c426c6f636b73436c656172656400"
)
MAPS_024 = bytes.fromhex(
    "93cb3ff80000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780084a474797065ac42"
    "6c6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da3475055a967726f75705f696478"
    "0081a474797065b0416c6c426c6f636b73436c656172656400"
)
TOKENS = [1, 2, 3, 4, 5, 6]  # three blocks of two
CHAIN = chain_of(TOKENS, 2)

Name = Callable[[int], Any]


@dataclass(frozen=True)
class Release:
    """The form of the events of one vLLM release. `name` makes a block's name from its number."""

    stored_tail: tuple[Any, ...]  # behind `lora_id`
    removed_tail: tuple[Any, ...] = ()
    name: Name = int
    maps: bool = False

    def stored(self, numbers: list[int], parent: int | None, tokens: list[int]) -> Any:
        head = ([self.name(n) for n in numbers], parent and self.name(parent), tokens, 2, None)
        if not self.maps:
            return ["BlockStored", *head, *self.stored_tail]
        keys = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
        optional = dict(zip(self.stored_tail[::2], self.stored_tail[1::2], strict=True))
        return {"type": "BlockStored", **dict(zip(keys, head, strict=True)), **optional}

    def removed(self, numbers: list[int]) -> Any:
        names = [self.name(n) for n in numbers]
        if not self.maps:
            return ["BlockRemoved", names, *self.removed_tail]
        optional = dict(zip(self.removed_tail[::2], self.removed_tail[1::2], strict=True))
        return {"type": "BlockRemoved", "block_hashes": names, **optional}

    def cleared(self) -> Any:
        return {"type": "AllBlocksCleared"} if self.maps else ["AllBlocksCleared"]


def digest(number: int) -> bytes:
    """Return a block name of 32 bytes, as `sha256` gives."""
    return bytes([7] * 24) + (number << 40).to_bytes(8, "big")


def half_digest(number: int) -> bytes:
    """Return a block name of 16 bytes, as `xxhash` gives."""
    return bytes([9] * 8) + (number + 2**63).to_bytes(8, "big")


def signed(number: int) -> int:
    """Return a block name that is a signed number, as Python's own `hash` gives, the default until
    0.9.
    """
    return -number - 2**62


SEMANTIC = ("full_attention", None)
MAP_HEAD = ("medium", "GPU", "lora_name", None)
RELEASES = {
    "0.9.2": Release((), name=signed),
    "0.10.2": Release(("GPU",), ("GPU",)),
    "0.10.2 bytes": Release(("GPU",), ("GPU",), digest),
    "0.14": Release(("GPU", None), ("GPU",), half_digest),
    "0.18": Release(("GPU", None, None), ("GPU",)),
    "0.20": Release(("GPU", None, None, 0), ("GPU", 0)),
    "0.23": Release(("GPU", None, [None, None], 0, *SEMANTIC), ("GPU", 0)),
    "0.23 with a field to come": Release(
        ("GPU", None, None, 0, *SEMANTIC, {"new": [1]}), ("GPU", 0, 5)
    ),
    "0.24": Release((*MAP_HEAD, "group_idx", 0), ("medium", "GPU", "group_idx", 0), maps=True),
    "0.33": Release(
        (
            *MAP_HEAD,
            *("group_idx", 0, "kv_cache_spec_kind", "full_attention", "locality", "local"),
            *("ownership", "owner", "session_id", "s-1", "lookahead_token_ids", [[7], [8]]),
        ),
        ("medium", "GPU", "group_idx", 0, "locality", "local", "ownership", "owner"),
        digest,
        maps=True,
    ),
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES.keys())
async def test_stored_removed_and_cleared_blocks_are_followed(release: Release) -> None:
    async with followed_publisher() as (one, engine, _):
        await engine.send(0, pack(release.stored([11, 12], None, TOKENS[:4])))
        await one.until_hit(CHAIN, 2)
        await engine.send(1, pack(release.stored([13], 12, TOKENS[4:])))
        await one.until_hit(CHAIN, 3)
        await engine.send(2, pack(release.removed([13])))
        await one.until_hit(CHAIN, 2)
        await engine.send(3, pack(release.removed([11])))
        await one.until_hit(CHAIN, 0)
        await engine.send(4, pack(release.stored([11], None, TOKENS[:2])))
        await one.until_hit(CHAIN, 2)  # block 12 was there all the time
        await engine.send(5, pack(release.cleared()))
        await one.until_hit(CHAIN, 0)
        assert one.kv().known
        assert one.kv().counters.gaps == 0


@pytest.mark.parametrize("vector", [ARRAYS_020, MAPS_024], ids=["arrays", "maps"])
async def test_the_published_vectors_store_remove_and_clear(vector: bytes) -> None:
    """The published test vectors store, remove and clear blocks; their events are applied one by
    one, because the whole batch ends in a clear.
    """
    parts = {
        "arrays": (vector[:11], vector[11:], b"\x94\xac", b"\x91\xb0"),
        "maps": (vector[:11], vector[11:], b"\x84\xa4type\xac", b"\x81\xa4type\xb0"),
    }
    head, events, removal, clear = parts["arrays" if vector is ARRAYS_020 else "maps"]
    assert head[-1:] == b"\x93"
    stored, removed = events[: events.index(removal)], events[events.index(removal) :]
    removed = removed[: removed.index(clear)]
    async with followed_publisher() as (one, engine, _):
        chain = chain_of([1, 2, 3, 4], 2)
        await engine.send(0, head[:-1] + b"\x91" + stored + b"\x00")
        await one.until_hit(chain, 2)
        await engine.send(1, head[:-1] + b"\x91" + removed + b"\x00")
        await one.until_hit(chain, 0)
        await engine.send(2, head[:-1] + b"\x91" + stored + b"\x00")
        await one.until_hit(chain, 2)
        await engine.send(3, vector)
        await one.until_hit(chain, 0)
        assert one.kv().known


async def test_adapters_and_salts_have_their_own_chains() -> None:
    async with followed_publisher() as (one, engine, _):
        old = ["BlockStored", [1], None, [1, 2], 2, 7, "GPU", "tuned", [["tuned"]], 0]
        new = {
            "type": "BlockStored",
            "block_hashes": [2],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_id": 7,
            "medium": "GPU",
            "lora_name": "tuned",
            "extra_keys": [["tuned", "blue"]],
        }
        salted = ["BlockStored", [3], None, [1, 2], 2, None, "GPU", None, [["blue"]], 0]
        await engine.send(0, pack(old, new, salted))
        for seed in (seed_of(lora="tuned"), seed_of("tuned", "blue"), seed_of(salt="blue")):
            await one.until_hit(chain_of([1, 2], 2, seed), 1)
        assert one.hit(CHAIN) == 0


async def test_event_formats_may_be_mixed_and_unknown_events_are_skipped() -> None:
    async with followed_publisher() as (one, engine, feed):
        arrays, maps = RELEASES["0.20"], RELEASES["0.24"]
        foreign: list[Any] = [
            ["BlockMoved", [1], "GPU", "CPU"],
            {"type": "BlockMoved", "block_hashes": [1]},
            ["BlockStored", [21, 22], None, [1, 2, 3], 2, None],  # too few tokens
            ["BlockStored", [23], None, ["<image>", 2], 2, None],
            ["BlockStored", [24], None, [[1, 2], [2, 3]], 2, None],
        ]
        await engine.send(0, pack(maps.stored([11], None, TOKENS[:2]), *foreign))
        await engine.send(1, pack(arrays.stored([12], 11, TOKENS[2:4])))
        await one.until_hit(CHAIN, 2)
        assert one.kv().known
        assert feed.counters.malformed_frames == 0
        skipped = feed.counters.skipped_events + one.kv().counters.skipped_events
        assert skipped == len(foreign)


@pytest.mark.parametrize("new_form", [False, True], ids=["to 0.25", "from 0.27"])
async def test_a_late_joiner_replays_and_continues_live(new_form: bool) -> None:
    release = RELEASES["0.33" if new_form else "0.23"]
    topic = b"kv@10.0.0.5:8000@m"
    async with rig() as one, publisher(one.context, topic, new_form) as engine:
        await engine.send(0, pack(release.stored([11], None, TOKENS[:2])))
        await engine.send(1, pack(release.stored([12], 11, TOKENS[2:4])))
        async with one.following(source_of(engine)) as feed:
            await one.until_hit(CHAIN, 2)
            await engine.until_subscribed()
            await engine.send(2, pack(release.stored([13], 12, TOKENS[4:])))
            await one.until_hit(CHAIN, 3)
            assert engine.asked == [0]
            assert one.kv().known
            await until(lambda: feed.counters.replays == 1, lambda: "the replay's end")


@pytest.mark.parametrize("new_form", [False, True], ids=["to 0.25", "from 0.27"])
async def test_a_gap_is_replayed_from_its_first_batch(new_form: bool) -> None:
    release = RELEASES["0.33" if new_form else "0.23"]
    async with followed_publisher(new_form=new_form) as (one, engine, _):
        await engine.send(0, pack(release.stored([11], None, TOKENS[:2])))
        await engine.send(1, pack(release.stored([12], 11, TOKENS[2:4])), lost=True)
        await engine.send(2, pack(release.stored([13], 12, TOKENS[4:])))
        await one.until_hit(CHAIN, 3)
        assert engine.asked == [0, 0]
        assert one.kv().counters.gaps == 1
        assert one.kv().known


async def test_other_topics_of_an_endpoint_are_ignored() -> None:
    release = RELEASES["0.33"]
    async with followed_publisher(topic=b"kv@one", replay=False) as (one, engine, _):
        engine.topic = b"load"
        await engine.send(0, pack(release.stored([99], None, [9, 9])))
        engine.topic = b"kv@one"
        await engine.send(0, pack(release.stored([11], None, TOKENS[:2])))
        await one.until_hit(CHAIN, 1)
        assert one.hit(chain_of([9, 9], 2)) == 0
        assert one.kv().counters.restarts == 0
