"""Tests of how many blocks a worker may claim to hold: as many as fit into its cache, with some
tolerance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import EventBatch
from policies.facts import Finish, FirstToken, KvEvents, LoadReport, WorkerChange
from router.core.contract.actions import Action, Doubted, Followed, Others
from router.core.workers.kv_events import WireEvents, gpu_blocks_in
from router.core.workers.kv_state import ROOM_SLACK, USELESS_EVENTS, KvState
from router.core.workers.mirror import BLOCKS_UNTOLD
from router.core.workers.table import Worker
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, removed, stored
from tests.router.crowded import crowd

ROOM = 100  # blocks
MOST = int(ROOM * ROOM_SLACK)


def world_of(blocks: float = ROOM, **settings: object) -> World:
    world = World(workers=0, **settings)  # type: ignore[arg-type]
    world.join(0, kv_capacity_tokens=blocks * BLOCK)
    world.join(1)
    return world


def worker_of(world: World, worker_id: int = 0) -> Worker:
    worker = world.core.workers.get(worker_id)
    assert worker is not None
    return worker


def held(world: World) -> int:
    return world.core.caches.index.held(worker_of(world).slot)


def kv_of(world: World) -> KvState:
    return worker_of(world).kv


def test_a_worker_never_counts_as_holding_more_blocks_than_fit() -> None:
    world = world_of(index_entries=4096)
    world.events(1, 0, stored([1, 2, 3]))
    actions: list[Action] = []
    for seq in range(5_000):
        actions += world.events(0, seq, stored([10 + seq]))
        assert held(world) <= MOST
    overflows = 5_000 // (MOST + 1)
    assert kv_of(world).overflows == overflows
    assert (
        actions == [Doubted(0, "overflow", 1.0)] * overflows.bit_length()
    )  # the 1st, 2nd, 4th ...
    assert world.hits([1, 2, 3]) == [0, 3]
    assert world.core.caches.index.evicted == 0  # nobody else's blocks made room


def test_a_worker_that_evicts_as_it_stores_never_overflows() -> None:
    world = world_of()
    for seq in range(1_000):
        gone = [removed([seq - ROOM])] if seq >= ROOM else []
        assert world.events(0, seq, *gone, stored([seq])) == []
    assert (held(world), kv_of(world).overflows, kv_of(world).exact) == (ROOM, 0, True)


def test_a_batch_with_more_blocks_than_fit_evicts_no_other_blocks() -> None:
    world = world_of(index_entries=1024)
    world.events(1, 0, stored([1, 2, 3]))
    assert world.events(0, 0, stored(list(range(10, 3_000)))) == [Doubted(0, "overflow", 1.0)]
    assert (held(world), world.hits([1, 2, 3])) == (0, [0, 3])
    assert world.core.caches.index.evicted == 0


def test_blocks_in_lower_tiers_do_not_count_against_the_gpu_capacity() -> None:
    world = world_of()
    for seq in range(10):
        blocks = [1_000 * seq + i for i in range(ROOM)]
        assert world.events(0, seq, replace(stored(blocks), tier="host")) == []
    assert kv_of(world).resident_blocks == 10 * ROOM


def test_a_worker_of_unknown_capacity_is_bounded_by_the_index() -> None:
    world = world_of(math.nan, index_entries=1024)
    for seq in range(2_000):
        world.events(0, seq, stored([seq]))
        assert held(world) <= 1024
    assert kv_of(world).overflows == 1


def test_a_worker_is_bounded_by_its_updated_capacity() -> None:
    world = world_of()
    world.join(0, kv_capacity_tokens=float(2 * ROOM * BLOCK))
    for seq in range(2 * MOST):
        assert world.events(0, seq, stored([seq])) == []
    assert world.events(0, 2 * MOST, stored([2 * MOST])) == [Doubted(0, "overflow", 1.0)]


@pytest.mark.parametrize("medium", [None, "CPU"])
def test_encoded_blocks_are_counted_by_tier_only_if_they_might_not_fit(medium: str | None) -> None:
    event = {
        "type": "BlockStored", "block_hashes": list(range(50)), "parent_block_hash": None,
        "token_ids": list(range(50 * BLOCK)), "block_size": BLOCK, "medium": medium,
    }  # fmt: skip
    events = WireEvents(EventBatch(msgspec.msgpack.encode([0.0, [event], 0])), "m")
    assert gpu_blocks_in(events, 50) == 50
    assert gpu_blocks_in(events, 49) == (50 if medium is None else 0)
    world = world_of(30)
    world.core.on_kv_events(KvEvents(0.0, 0, 0, events))
    assert kv_of(world).overflows == (medium is None)
    assert np.array_equal(world.hits([0]), [0, 0])


@pytest.mark.parametrize("wire", [False, True])
def test_a_worker_without_usable_events_is_reported_once(wire: bool) -> None:
    """If no event of a worker can be used, that is reported once: the blocks have only names
    without meaning, and their tokens are pairs.
    """

    def tell(worker: int, seq: int) -> list[Action]:
        if not wire:
            return world.events(worker, seq, replace(stored([seq]), parent=None, tokens=()))
        event = {
            "type": "BlockStored", "block_hashes": [seq], "parent_block_hash": None,
            "token_ids": [[1, 2]] * BLOCK, "block_size": BLOCK, "medium": None,
        }  # fmt: skip
        events = WireEvents(EventBatch(msgspec.msgpack.encode([0.0, [event], 0])), "m")
        return world.core.on_kv_events(KvEvents(0.0, worker, seq, events))

    world = world_of()
    actions = [tell(0, seq) for seq in range(3 * USELESS_EVENTS)]
    assert actions.pop(USELESS_EVENTS - 1) == [Doubted(0, "useless", 1.0)]
    assert not any(actions)
    assert (kv_of(world).known, worker_of(world, 0).has_usable_events) == (False, False)
    assert world.events(1, 0, stored([1])) == []
    for seq in range(1, 3 * USELESS_EVENTS):  # some could be used
        assert tell(1, seq) == []
    assert world.events(0, 3 * USELESS_EVENTS, stored([1])) == [Followed(0, BLOCK, BLOCK)]
    assert (kv_of(world).known, worker_of(world, 0).has_usable_events) == (True, True)


def capacity_of(world: World, worker_id: int = 0) -> float:
    """Return the worker's KV capacity in blocks as decisions use it."""
    slot = worker_of(world, worker_id).slot
    return float(world.core.columns.kv_capacity_tokens[slot]) / BLOCK


@settings(max_examples=examples(100), deadline=None)
@given(
    capacity=st.integers(4, 60),
    prompts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=120),
)
def test_the_capacity_is_learned_from_evictions(
    capacity: int, prompts: list[tuple[int, int]]
) -> None:
    """The capacity of an engine that does not report it is learned from its evictions; the engine
    evicts the least recently used block when it must.
    """
    world = World(workers=0)
    world.join(0, kv_capacity_tokens=math.nan)
    cache: dict[int, None] = {}
    pushed_out, full = 0, False
    for seq, (family, blocks) in enumerate(prompts):
        wanted = range(10 * family, 10 * family + blocks)
        events = []
        for n, block in enumerate(wanted):
            if cache.pop(block, 0) is not None:
                if len(cache) == capacity:
                    oldest = next(iter(cache))
                    del cache[oldest]
                    chain = list(range(10 * (oldest // 10), oldest + 1))
                    events.append(removed(chain))
                    pushed_out, full = pushed_out + 1, True
                events.append(stored(list(wanted[: n + 1]), after=n))
            cache[block] = None
        for block in reversed(wanted):  # the end of a prompt goes first
            cache[block] = cache.pop(block)
        world.events(0, seq, *events)
    learned = capacity_of(world)
    assert math.isnan(learned) == (pushed_out == 0 or pushed_out < capacity / 16)
    assert math.isnan(learned) or learned == pytest.approx(capacity, abs=4)
    assert full or math.isnan(learned)
    world.core.on_worker(WorkerChange(world.now_s, 0, "down"))  # perhaps another one comes back
    assert math.isnan(capacity_of(world))


def test_the_reported_capacity_overrides_the_learned_one() -> None:
    world = world_of(ROOM)
    world.events(0, 0, stored([1, 2, 3]))
    world.events(0, 1, removed([1, 2, 3]))
    assert capacity_of(world) == ROOM


def test_the_capacity_of_a_worker_without_events_is_learned_from_answers() -> None:
    world = World(workers=0)
    world.join(0, kv_capacity_tokens=math.nan, has_events=False)
    for family in range(3):
        answered(world, [10 * family + n for n in range(8)], 0)
    assert math.isnan(capacity_of(world))
    answered(world, list(range(8)), 2)  # six of its blocks are gone
    assert 8 <= capacity_of(world) < BLOCKS_UNTOLD


def answered(world: World, blocks: list[int], cached_blocks: int) -> None:
    """Send a request whose answer reports `cached_blocks` cached blocks."""
    arrival = world.arrival(blocks)
    world.core.on_arrival(arrival)
    tokens = arrival.prompt_tokens
    world.core.on_first_token(FirstToken(world.now_s, arrival.request_id))
    finish = Finish(world.now_s, arrival.request_id, tokens, cached_blocks * BLOCK, output_tokens=1)
    world.core.on_finish(finish)


def test_a_high_share_of_foreign_requests_is_reported_once_and_its_end_once() -> None:
    world = World(workers=1)
    actions: list[Action] = []
    for second, running in enumerate([*[0] * 200, *[5] * 200, *[0] * 200]):
        report = LoadReport(float(second), 0, running, 0, math.nan)
        actions += world.core.on_load_report(report)
    assert actions == [Others(1.0, many=True), Others(0.0, many=False)]


async def test_the_admin_port_and_the_log_show_learned_capacity_and_foreign_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with crowd(1) as pool:
        dispatcher = pool.router.dispatcher

        async def seen() -> tuple[float | None, bool]:
            async with pool.http.get(f"{pool.url}/workers") as reply:
                (row,) = (await reply.json())["workers"]
            return row["kv_capacity_tokens"], row["kv_capacity_learned"]

        worker = dispatcher.core.workers.get(0)
        assert worker is not None
        untold: dict[str, Any] = {"has_events": True, "kv_capacity_tokens": math.nan}
        pool.state(0, "ready", replace(worker.facts, block_size=BLOCK, **untold))
        assert await seen() == (None, False)
        now_s = dispatcher.clock()
        for seq, event in enumerate((stored(list(range(32))), removed(list(range(32)), last=4))):
            dispatcher.handle_fact(KvEvents(now_s, 0, seq, (event,)))
        assert await seen() == (32 * BLOCK, True)
        for later_s in (0.0, 61.0):
            dispatcher.handle_fact(LoadReport(dispatcher.clock() + later_s, 0, 5, 0, math.nan))
        assert "100 % of the requests at the workers are not of this router" in caplog.text
