"""Tests of engines whose events have blocks of another size than the engine reported."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvkernels import EventBatch, chain_hashes
from policies.facts import KvEvents, ReplayEnd
from router.core.contract.actions import Action, Doubted, Followed, Resync
from router.core.workers.block_sizes import BlockSizes
from router.core.workers.kv_events import WireEvents
from tests.router.core.core_world import BLOCK, World
from tests.router.events.feed_support import feed_line, until

BIG = 48 * BLOCK


def prompt(seed: int, size: int, blocks: int) -> dict[str, Any]:
    """Return a store event with the blocks of one prompt."""
    ids = [(seed * 7919 + i) % 50_000 for i in range(size * blocks)]
    names = [seed * 1000 + i for i in range(blocks)]
    return {"type": "BlockStored", "block_hashes": names, "token_ids": ids, "block_size": size}


def tell(world: World, seq: int, *raw_events: Any, source: Any = "live") -> list[Action]:
    payload = msgspec.msgpack.encode([0.0, raw_events, 0])
    events, digest = WireEvents(EventBatch(payload), "m"), xxh3_64_intdigest(payload)
    fact = KvEvents(0.0, 0, seq, events, source, digest)
    return world.core.on_kv_events(fact)


def worker_of(world: World) -> Any:
    return world.core.workers.get(0)


def hit_blocks(world: World, seed: int, size: int, blocks: int) -> int:
    chain = chain_hashes(np.array(prompt(seed, size, blocks)["token_ids"], dtype=np.int32), size)
    return int(world.core.caches.index.longest_prefix(chain)[worker_of(world).slot])


@pytest.mark.parametrize("size", [BIG, BLOCK // 2])
def test_the_block_size_is_taken_from_the_events(size: int) -> None:
    world = World(workers=1)
    actions = tell(world, 0, prompt(1, size, 4))
    assert actions == [Followed(0, size, BLOCK)]
    for seq in range(1, 20):
        assert tell(world, seq, prompt(seq + 1, size, 2)) == []
    worker = worker_of(world)
    assert (worker.facts.block_size, worker.told_block_size) == (size, BLOCK)
    assert (worker.kv.known, worker.kv.exact, worker.kv.guessed) == (True, True, None)
    assert hit_blocks(world, 1, size, 4) == 4
    assert worker.kv.resident_blocks == 4 + 2 * 19
    assert world.core.workers.block_sizes(worker.facts.models[0]) == {size}


def test_earlier_batches_are_requested_again_after_a_new_block_size() -> None:
    world = World(workers=1)
    tell(world, 0, prompt(1, BLOCK // 2, 1))  # perhaps the unfinished end of a prompt
    assert worker_of(world).facts.block_size == BLOCK
    assert Resync(0, 0) in tell(world, 1, prompt(2, BLOCK // 2, 2))
    for seq in range(2):
        tell(world, seq, prompt(seq + 1, BLOCK // 2, seq + 1), source="replay")
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert worker_of(world).kv.exact
    assert hit_blocks(world, 1, BLOCK // 2, 1) == 1
    assert hit_blocks(world, 2, BLOCK // 2, 2) == 2


def test_a_worker_keeps_the_learned_size_when_its_facts_are_updated() -> None:
    world = World(workers=1)
    tell(world, 0, prompt(1, BIG, 2))
    world.join(0, max_requests=7.0)
    worker = worker_of(world)
    assert (worker.facts.block_size, worker.facts.max_requests) == (BIG, 7.0)
    assert hit_blocks(world, 1, BIG, 2) == 2
    world.join(0, block_size=32)  # it says another size now
    assert worker.facts.block_size == 32


def test_a_restart_with_another_block_size_gives_exact_hits_again() -> None:
    world = World(workers=1)
    tell(world, 0, prompt(1, BIG, 2))
    tell(world, 1, prompt(2, BIG, 2))
    actions = tell(world, 0, prompt(3, BLOCK, 4))
    assert actions == [Followed(0, BLOCK, BLOCK)]
    worker = worker_of(world)
    assert (worker.facts.block_size, worker.kv.exact) == (BLOCK, True)
    assert hit_blocks(world, 3, BLOCK, 4) == 4
    assert hit_blocks(world, 1, BIG, 2) == 0


def test_a_single_event_of_another_size_changes_nothing() -> None:
    world = World(workers=1)
    tell(world, 0, *(prompt(seed, BLOCK, 2) for seed in range(1, 19)), prompt(50, 4 * BLOCK, 2))
    for seq in range(1, 10):
        assert tell(world, seq, prompt(100 + seq, 4 * BLOCK, 1)) == []
        tell(world, seq + 100, source="replay")
    worker = worker_of(world)
    assert (worker.facts.block_size, worker.kv.guessed) == (BLOCK, None)
    assert hit_blocks(world, 3, BLOCK, 2) == 2


def test_a_worker_with_mixed_block_sizes_is_mirrored_until_they_agree() -> None:
    world = World(workers=1)
    actions: list[Action] = []
    for seq in range(40):
        actions += tell(world, seq, prompt(seq + 1, BLOCK if seq % 2 else 2 * BLOCK, 2))
    assert Doubted(0, "sizes", 1.0) in actions
    worker = worker_of(world)
    assert (worker.kv.guessed, worker.kv.known, worker.has_usable_events) == ("sizes", False, False)
    assert math.isnan(world.core.columns.cached_tokens[worker.slot])
    tell(world, 0, prompt(99, worker.facts.block_size, 2))  # its engine began anew
    assert (worker.kv.guessed, worker.kv.known, worker.has_usable_events) == (None, True, True)


def test_a_few_events_of_another_size_do_not_change_the_agreed_size() -> None:
    sizes = BlockSizes(16)
    sizes.note(3, [])
    for _ in range(80):
        sizes.note(0, [(768, 1, 0)])
    assert sizes.agreed == 768
    sizes.follow(768)
    for _ in range(3):
        sizes.note(0, [(16, 0, 1)])
    sizes.note(5, [])
    assert (sizes.agreed, sizes.mixed) == (768, False)


async def test_the_block_size_is_learned_over_sockets_with_a_replay() -> None:
    async with feed_line() as one:
        publisher = one.publisher
        for seq in range(60):
            event = prompt(seq + 1, BIG, 2)
            publisher.others[seq] = msgspec.msgpack.encode([0.0, [event], 0])
        for _ in range(3):
            await publisher.publish(lost=True)
        await one.subscribed()
        await until(lambda: one.kv.known and one.kv.next_seq == publisher.next_seq, "all of it")
        assert one.kv.resident_blocks == 2 * publisher.next_seq
        assert worker_of(one.world).facts.block_size == BIG
