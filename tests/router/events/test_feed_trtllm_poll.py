"""Tests of TensorRT-LLM's events by `POST /kv_cache_events`, from the documented JSON to
the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from router.events import trtllm as polling_module
from router.events.sources import PollSource
from tests.router.events.feed_wire import chain_of, rig, seed_of, until
from tests.router.events.trtllm_serve import (
    CHAIN,
    CREATED,
    HEX_NAMES,
    NAMES,
    SIZE,
    TOKENS,
    block,
    moved,
    polled,
    removed,
    serving,
    stored,
)


@pytest.mark.parametrize("names", [NAMES, HEX_NAMES], ids=["v1_block_key", "v2_sha256"])
async def test_stored_and_removed_blocks_are_followed(names: list[Any]) -> None:
    async with polled() as (one, engine, feed):
        first, second = (block(n, TOKENS[i * 4 : i * 4 + 4]) for i, n in enumerate(names[:2]))
        engine.emit(CREATED, stored(None, first, second))
        await one.until_hit(CHAIN, 2)
        engine.emit(stored(names[1], block(names[2], TOKENS[8:])))
        await one.until_hit(CHAIN, 3)
        engine.emit(removed(names[2], names[1]))
        await one.until_hit(CHAIN, 1)
        assert one.kv().known
        assert one.kv().counters.gaps == 0
        assert feed.counters.malformed_frames == 0
        assert engine.polls >= 2


async def test_events_without_a_window_size_are_followed() -> None:
    async with polled() as (one, engine, _):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])), window=None)
        await one.until_hit(CHAIN, 1)


async def test_only_the_largest_window_counts() -> None:
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, window=512)
        engine.emit(CREATED, window=4096)
        engine.emit(stored(None, block(1, TOKENS[:4]), block(2, TOKENS[4:8])))
        engine.emit(stored(None, block(1, TOKENS[:4])), window=512)
        engine.emit(removed(1), window=512)
        engine.emit(stored(2, block(3, TOKENS[8:])))
        await one.until_hit(CHAIN, 3)
        assert one.kv().known
        assert feed.counters.other_windows == 2


async def test_a_partial_block_and_its_removal_change_nothing() -> None:
    async with polled() as (one, engine, _):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4]), block(2, TOKENS[4:6])))
        await one.until_hit(CHAIN, 1)
        engine.emit(removed(2), stored(1, block(3, TOKENS[4:8])))
        await one.until_hit(CHAIN, 2)
        assert one.kv().counters.skipped_events >= 1
        assert one.kv().known


async def test_a_block_moves_between_the_gpu_and_the_host() -> None:
    async with polled() as (one, engine, _):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4]), block(2, TOKENS[4:8])))
        await one.until_hit(CHAIN, 2)
        engine.emit(moved(2, 0, 1))
        await one.until_hit(CHAIN, 1)
        assert one.hit(CHAIN, tier=1) == 2
        engine.emit(moved(2, 1, 0))
        await one.until_hit(CHAIN, 2)
        engine.emit(moved(1, 0, 1), removed(1))
        await one.until_hit(CHAIN, 0)
        await until(lambda: one.hit(CHAIN, tier=1) == 0, lambda: "the removal from the host")
        engine.emit(stored(None, block(1, TOKENS[:4], level=1)))  # stored on the host at once
        await until(lambda: one.hit(CHAIN, tier=1) == 2, lambda: "the block on the host")
        assert one.hit(CHAIN) == 0
        priority = moved(2, 0, 0) | {"cache_level": None, "priority": {"new_value": 1}}
        engine.emit(priority, moved(99, 0, 1), removed(99))
        engine.emit(moved(1, 1, 0))
        await one.until_hit(CHAIN, 2)
        assert one.kv().known


async def test_images_are_part_of_their_blocks_hash() -> None:
    image = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 3}
    async with polled() as (one, engine, _):
        pictured = block(2, TOKENS[4:8], mm_keys=[image])
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4]), pictured, block(3, TOKENS[8:])))
        extra = b"ab" * 32 + (3).to_bytes(4, "little")
        first = chain_of(TOKENS[:4], SIZE)
        second = chain_of(TOKENS[4:8], SIZE, first[-1], extra)
        third = chain_of(TOKENS[8:], SIZE, second[-1])
        await one.until_hit([*first, *second, *third], 3)
        assert one.hit(CHAIN) == 1


async def test_salted_blocks_have_their_own_chains() -> None:
    async with polled() as (one, engine, _):
        first, second = (block(n, TOKENS[n * 4 : n * 4 + 4], cache_salt="blue") for n in (0, 1))
        engine.emit(CREATED, stored(None, first, second))
        await one.until_hit(chain_of(TOKENS[:8], SIZE, seed_of(salt="blue")), 2)
        assert one.hit(CHAIN) == 0


@pytest.mark.parametrize(
    "odd",
    [
        block(2, ["<image>", 5, 6, 7]),
        block(2, TOKENS[4:8]) | {"tokens": [{"token_id": 1, "token_extra_id": 9}] * 4},
    ],
    ids=["strings", "prompt tuning"],
)
async def test_blocks_whose_tokens_are_not_plain_ids_are_skipped(odd: dict[str, Any]) -> None:
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4]), odd, block(3, TOKENS[8:])))
        engine.emit(stored(1, block(4, TOKENS[4:8])))
        await one.until_hit(CHAIN, 2)
        assert feed.counters.skipped_events == 1
        assert one.kv().parked_blocks == 0


async def test_a_jump_in_event_numbers_is_a_gap_that_cannot_be_filled() -> None:
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        engine.numbers[None] += 3  # its buffer was full: the oldest are gone
        engine.emit(stored(None, block(7, [7, 7, 7, 7])))
        await one.until_hit(chain_of([7] * 4, SIZE), 1)
        assert not one.kv().known
        assert one.hit(CHAIN) == 0
        assert feed.counters.failed_syncs == 1


async def test_a_late_joiner_knows_only_a_part() -> None:
    """A router that joins late knows only a part of the cache, because events that another client
    has read are gone.
    """
    async with polled() as (one, engine, _):
        engine.numbers[None] = 40
        engine.emit(stored(None, block(1, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        assert not one.kv().known


async def test_events_lost_to_another_reader_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        engine.numbers[None] += 1  # told to somebody else
        engine.emit(removed(1))
        await until(lambda: feed.counters.failed_syncs == 1, lambda: "the gap")
        assert not one.kv().known
        assert one.hit(CHAIN) == 0  # what was missed may have been its end
        assert "kv_cache_events forgets what it told; has it another reader?" in caplog.text


async def test_a_restarted_engine_is_followed_from_its_first_event() -> None:
    async with polled() as (one, engine, _):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])), removed(5), window=4096)
        await one.until_hit(CHAIN, 1)
        engine.numbers = {}
        engine.emit(CREATED, stored(None, block(9, [7, 7, 7, 7])), window=512)
        await one.until_hit(chain_of([7] * 4, SIZE), 1)
        assert one.hit(CHAIN) == 0
        assert one.kv().known
        assert one.kv().counters.restarts == 1


async def test_one_reader_serves_all_ranks_behind_a_url() -> None:
    async with (
        serving() as engine,
        rig() as one,
        one.following(PollSource(engine.url, rank=0), 0, block_size=SIZE),
        one.following(PollSource(engine.url, rank=1), 1, block_size=SIZE),
    ):
        await until(lambda: len(one.readers) == 1, lambda: "the reader")
        for rank in (0, 1):
            engine.emit(CREATED, rank=rank)
        engine.emit(stored(None, block(1, TOKENS[:4])), rank=0)
        engine.emit(stored(None, block(1, [7, 7, 7, 7])), rank=1)
        await one.until_hit(CHAIN, 1, worker_id=0)
        await one.until_hit(chain_of([7] * 4, SIZE), 1, worker_id=1)
        assert one.hit(CHAIN, worker_id=1) == 0
        assert one.kv(0).known
        assert one.kv(1).known


def refused() -> web.Response:
    return web.Response(status=500)


def garbage() -> web.Response:
    return web.Response(text='[{"event_id": 1')


def too_long() -> web.Response:
    return web.Response(body=b" " * 5_000)


@pytest.mark.parametrize("spoil", [refused, garbage, too_long])
async def test_a_lost_answer_is_a_gap(
    spoil: Callable[[], web.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling_module, "_ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(polling_module, "MAX_PAYLOAD_BYTES", 4_000)
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        engine.spoil = spoil
        engine.emit(removed(1))
        await until(lambda: feed.counters.failed_polls == 1, lambda: "the poll to fail")
        engine.emit(stored(None, block(9, [7, 7, 7, 7])))
        await one.until_hit(chain_of([7] * 4, SIZE), 1)
        assert not one.kv().known
        assert one.hit(CHAIN) == 0


async def test_on_shutdown_a_running_poll_completes_and_no_other_begins() -> None:
    async with polled() as (one, engine, _):
        engine.emit(CREATED, stored(None, block(1, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        polls = engine.polls
        await until(lambda: engine.polls > polls, lambda: "another poll")
        finishing = asyncio.create_task(one.readers.finish(30))
        engine.emit(stored(1, block(2, TOKENS[4:8])))
        await finishing
        await one.until_hit(CHAIN, 2)
        polls = engine.polls
        await one.readers.finish(30)
        assert engine.polls == polls


async def test_an_unreadable_event_costs_no_other_event() -> None:
    async with polled() as (one, engine, feed):
        engine.emit(CREATED, {"type": "stored", "blocks": [{"block_hash": -1.5}]})
        engine.emit(stored(None, block(9, [7, 7, 7, 7])))
        await one.until_hit(chain_of([7] * 4, SIZE), 1)
        assert feed.counters.malformed_frames == 1
        assert not one.kv().known  # what it said is missing


async def test_an_engine_that_starts_later_is_polled_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling_module, "_ASK_AGAIN_S", 0.01)
    async with serving() as engine:
        gone = engine.url
    async with rig() as one, one.following(PollSource(gone), block_size=SIZE) as feed:
        await until(lambda: feed.counters.failed_polls >= 2, lambda: "polls to fail")
