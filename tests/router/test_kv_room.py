"""What a worker may tell to hold: what fits into its cache, with some slack."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvkernels import EventBatch
from policies.facts import KvEvents
from router.core.actions import Action, Doubted
from router.core.kv_events import WireEvents, gpu_blocks_in
from router.core.kv_state import ROOM_SLACK, USELESS_EVENTS, KvState
from router.core.workers import Worker
from tests.router.core_world import BLOCK, World, removed, stored

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
    return world.core.roster.index.held(worker_of(world).slot)


def kv_of(world: World) -> KvState:
    return worker_of(world).kv


def test_one_that_tells_of_ever_more_blocks_is_never_believed_to_hold_more_than_fit() -> None:
    world = world_of(index_entries=4096)
    world.events(1, 0, stored([1, 2, 3]))
    told: list[Action] = []
    for seq in range(5_000):
        told += world.events(0, seq, stored([10 + seq]))
        assert held(world) <= MOST
    overflows = 5_000 // (MOST + 1)
    assert kv_of(world).overflows == overflows
    assert told == [Doubted(0, "overflow", 1.0)] * overflows.bit_length()  # the 1st, 2nd, 4th ...
    assert world.hits([1, 2, 3]) == [0, 3]
    assert world.core.roster.index.evicted == 0  # nobody else's blocks made room


def test_one_that_evicts_as_it_stores_is_believed_whatever_it_turns_over() -> None:
    world = world_of()
    for seq in range(1_000):
        gone = [removed([seq - ROOM])] if seq >= ROOM else []
        assert world.events(0, seq, *gone, stored([seq])) == []
    assert (held(world), kv_of(world).overflows, kv_of(world).exact) == (ROOM, 0, True)


def test_a_batch_with_more_than_fit_is_refused_before_it_costs_others_their_place() -> None:
    world = world_of(index_entries=1024)
    world.events(1, 0, stored([1, 2, 3]))
    assert world.events(0, 0, stored(list(range(10, 3_000)))) == [Doubted(0, "overflow", 1.0)]
    assert (held(world), world.hits([1, 2, 3])) == (0, [0, 3])
    assert world.core.roster.index.evicted == 0


def test_what_it_holds_below_the_gpu_does_not_count() -> None:
    world = world_of()
    for seq in range(10):
        blocks = [1_000 * seq + i for i in range(ROOM)]
        assert world.events(0, seq, replace(stored(blocks), tier="host")) == []
    assert kv_of(world).resident_blocks == 10 * ROOM


def test_where_its_room_is_not_known_the_index_bounds_it() -> None:
    world = world_of(math.nan, index_entries=1024)
    for seq in range(2_000):
        world.events(0, seq, stored([seq]))
        assert held(world) <= 1024
    assert kv_of(world).overflows == 1


def test_one_that_was_recognized_with_other_room_is_held_to_that() -> None:
    world = world_of()
    world.join(0, kv_capacity_tokens=float(2 * ROOM * BLOCK))
    for seq in range(2 * MOST):
        assert world.events(0, seq, stored([seq])) == []
    assert world.events(0, 2 * MOST, stored([2 * MOST])) == [Doubted(0, "overflow", 1.0)]


@pytest.mark.parametrize("medium", [None, "CPU"])
def test_blocks_of_the_wire_are_counted_by_their_tier_where_it_matters(medium: str | None) -> None:
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
def test_events_of_which_none_can_be_used_are_told_of_once(wire: bool) -> None:
    size = 2 * BLOCK

    def tell(worker: int, seq: int) -> list[Action]:
        if not wire:
            event = replace(stored([seq]), tokens=(1,) * size, block_size=size)
            return world.events(worker, seq, event)
        told = {
            "type": "BlockStored", "block_hashes": [seq], "parent_block_hash": None,
            "token_ids": [1] * size, "block_size": size, "medium": None,
        }  # fmt: skip
        events = WireEvents(EventBatch(msgspec.msgpack.encode([0.0, [told], 0])), "m")
        return world.core.on_kv_events(KvEvents(0.0, worker, seq, events))

    world = world_of()
    told = [tell(0, seq) for seq in range(3 * USELESS_EVENTS)]
    assert told.pop(USELESS_EVENTS - 1) == [Doubted(0, "useless", 1.0)]
    assert not any(told)
    assert world.events(1, 0, stored([1])) == []
    for seq in range(1, 3 * USELESS_EVENTS):  # some could be used
        assert tell(1, seq) == []
