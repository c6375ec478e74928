"""Tests of SGLang's events over real sockets: arrays with signed names (0.5.9) and maps (0.5.20,
0.5.23).

Field orders: SGLang `disaggregation/kv_events.py`. Names of pages: the first 8 bytes, signed, of
SHA-256 over the page's tokens after the previous digest.
"""

from __future__ import annotations

import hashlib
import struct
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

PAGE = 16
TOKENS = [*range(1, 33), *range(101, 133)]  # the third page's name is negative
CHAIN = chain_of(TOKENS, PAGE)


def names_of(tokens: list[int], page: int) -> list[int]:
    """Return the block names that SGLang 0.5.9 gives (`mem_cache/utils.py`): signed and chained."""
    names, digest = [], b""
    for start in range(0, len(tokens), page):
        words = struct.pack(f"<{page}I", *tokens[start : start + page])
        digest = hashlib.sha256(digest + words).digest()
        names.append(int.from_bytes(digest[:8], "big", signed=True))
    return names


NAMES = names_of(TOKENS, PAGE)


def stored_array(at: int, pages: int = 1) -> list[Any]:
    """Return a store event of SGLang 0.5.9 to 0.5.18, in array form, with `pages` pages."""
    names, tokens = NAMES[at : at + pages], TOKENS[at * PAGE : (at + pages) * PAGE]
    return ["BlockStored", names, NAMES[at - 1] if at else None, tokens, PAGE, None, "GPU"]


def stored_map(at: int, pages: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a store event of SGLang 0.5.20 and later, a map without nil fields."""
    return {
        "type": "BlockStored",
        "block_hashes": NAMES[at : at + pages],
        "parent_block_hash": NAMES[at - 1] if at else None,
        "token_ids": TOKENS[at * PAGE : (at + pages) * PAGE],
        "block_size": PAGE,
        "lora_id": None,
        **fields,
    }


def test_page_names_equal_those_of_sglang() -> None:
    """Page names equal those of SGLang 0.5.9 for the tokens 1 to 32 in pages of 16."""
    assert NAMES[:2] == [8635429971592222890, 1256577331724852459]
    assert NAMES[2] < 0, "it must be negative to show anything, as a name and as a parent"


async def test_arrays_with_signed_names_are_followed() -> None:
    async with followed_publisher(new_form=False, block_size=PAGE) as (one, engine, _):
        await engine.send(0, pack(*(stored_array(at) for at in range(4))))
        await one.until_hit(CHAIN, 4)
        await engine.send(1, pack(["BlockRemoved", [NAMES[3]], "GPU"]))
        await one.until_hit(CHAIN, 3)
        await engine.send(2, pack(["BlockRemoved", NAMES[:1]], rank=None))  # no medium: the GPU
        await one.until_hit(CHAIN, 0)
        await engine.send(3, pack(stored_array(0)))
        await one.until_hit(CHAIN, 3)
        await engine.send(4, pack(["AllBlocksCleared"]))
        await one.until_hit(CHAIN, 0)
        assert one.kv().known


async def test_maps_of_several_pages_and_other_media_are_followed() -> None:
    async with followed_publisher(block_size=PAGE) as (one, engine, _):
        await engine.send(0, pack(stored_map(0, 3, medium="GPU", session_id="s"), stored_map(3)))
        await one.until_hit(CHAIN, 4)
        copies = [stored_map(2, 2, medium=medium) for medium in ("CPU_PINNED", "DISK", "EXTERNAL")]
        gone = {"type": "BlockRemoved", "block_hashes": NAMES[2:], "medium": "CPU_PINNED"}
        await engine.send(1, pack(*copies, gone))
        await one.until_seq(1)
        assert one.hit(CHAIN) == 4  # what left the host is on the GPU all the same
        await engine.send(2, pack({"type": "BlockRemoved", "block_hashes": NAMES[3:]}))
        await one.until_hit(CHAIN, 3)
        await engine.send(3, pack({"type": "AllBlocksCleared"}))
        await one.until_hit(CHAIN, 0)


async def test_salts_and_adapters_have_their_own_chains() -> None:
    async with followed_publisher(block_size=PAGE) as (one, engine, _):
        salted = stored_map(0, 1, cache_salt="blue")
        both = stored_map(0, 1, cache_salt="blue", lora_name="tuned") | {"block_hashes": [-5]}
        await engine.send(0, pack(salted, both))
        await one.until_hit(chain_of(TOKENS[:PAGE], PAGE, seed_of(salt="blue")), 1)
        await one.until_hit(chain_of(TOKENS[:PAGE], PAGE, seed_of("tuned", "blue")), 1)
        assert one.hit(CHAIN) == 0


async def test_pages_of_one_token_are_blocks_of_one_token() -> None:
    """Pages of one token are blocks of one token; SGLang's page size is one token if the operator
    sets none.
    """
    tokens = TOKENS[:5]
    names = names_of(tokens, 1)
    events = [
        ["BlockStored", [name], names[at - 1] if at else None, [tokens[at]], 1, None, "GPU"]
        for at, name in enumerate(names)
    ]
    async with followed_publisher(block_size=1) as (one, engine, _):
        await engine.send(0, pack(*events))
        await one.until_hit(chain_of(tokens, 1), 5)


async def test_bigrams_are_skipped_and_the_stream_continues() -> None:
    """Events with pairs of token ids, which EAGLE makes and no request uses, are skipped, and the
    stream continues.
    """
    pairs = [[t, t + 1] for t in TOKENS[:PAGE]]
    odd = ["BlockStored", [77], None, pairs, PAGE, None, "GPU"]
    async with followed_publisher(block_size=PAGE) as (one, engine, feed):
        await engine.send(0, pack(odd, stored_array(0)))
        await one.until_hit(CHAIN, 1)
        assert feed.counters.malformed_frames == 0
        assert feed.counters.skipped_events + one.kv().counters.skipped_events == 1


@pytest.mark.parametrize("new_form", [False, True], ids=["to 0.5.20", "0.5.23"])
async def test_a_late_joiner_replays_from_the_beginning(new_form: bool) -> None:
    event = stored_map if new_form else stored_array
    async with rig() as one, publisher(one.context, new_form=new_form) as engine:
        await engine.send(0, pack(event(0, 2)))
        await engine.send(1, pack(event(2, 2)))
        async with one.following(source_of(engine), block_size=PAGE) as feed:
            await one.until_hit(CHAIN, 4)
            await until(lambda: feed.counters.replays == 1, lambda: "the replay's end")
            assert one.kv().known
