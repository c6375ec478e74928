"""Tests of causes other than a gap that make hits a lower bound: the index is full, or a restart is
unproven.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import (
    Cleared,
    Finish,
    KvCopied,
    KvHeard,
    LoadReport,
    ReplayEnd,
    Tick,
    WorkerChange,
)
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, removed, stored

LIMIT = 1_024


def kv(world: World, worker_id: int = 0):
    return world.core.workers.get(worker_id).kv


def unknown(world: World, worker_id: int = 0) -> bool:
    return bool(world.core.columns.hits_unknown[world.core.workers.get(worker_id).slot])


def fill(world: World, worker_id: int, first: int, blocks: int, seq: int = 0) -> None:
    events = [stored([first + n]) for n in range(blocks)]
    world.events(worker_id, seq, *events)


# --- the index's bound --------------------------------------------------------------------------


def test_hits_are_a_lower_bound_after_index_evictions_until_a_snapshot() -> None:
    world = World(workers=2, index_entries=LIMIT)
    fill(world, 0, 0, 700)
    assert kv(world).exact
    fill(world, 1, 10_000, 700)
    assert [kv(world, one).evicted_blocks > 0 for one in (0, 1)] == [True, True]
    assert [kv(world, one).known for one in (0, 1)] == [False, False]
    world.core.on_tick(Tick(1.0))
    assert [unknown(world, one) for one in (0, 1)] == [True, True]
    world.core.on_worker(WorkerChange(1.0, 1, "gone"))
    assert not kv(world).known
    world.events(0, 5, *(stored([n]) for n in range(700)), source="snapshot")
    assert kv(world).exact
    assert not unknown(world)


def test_a_worker_is_known_again_when_its_evicted_blocks_are_replaced() -> None:
    world = World(workers=0, index_entries=LIMIT)
    for worker_id in (0, 1):
        world.join(worker_id, kv_capacity_tokens=600.0 * BLOCK)
    fill(world, 0, 0, 600)
    fill(world, 1, 10_000, 600)
    assert not kv(world).known
    world.core.on_worker(WorkerChange(1.0, 1, "gone"))
    world.events(0, 1, removed([599]), stored([30_000]))  # as of it the loss is seen
    for n in range(600):
        assert not kv(world).known
        world.events(0, 2 + n, removed([n]), stored([20_000 + n]))
    assert (kv(world).known, kv(world).exact) == (True, False)


def test_the_index_evicts_no_blocks_below_its_limit() -> None:
    world = World(workers=2, index_entries=LIMIT)
    fill(world, 0, 0, LIMIT // 2)
    fill(world, 1, 10_000, LIMIT // 2)
    world.core.on_tick(Tick(1.0))
    assert all(kv(world, one).exact for one in (0, 1))


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.booleans()), max_size=30),
)
def test_a_known_worker_has_all_of_its_blocks_in_the_index(
    steps: list[tuple[int, int, bool]],
) -> None:
    """A worker whose cache counts as known has all of its blocks in the index, for any stores and
    removals in an index with room for half of the blocks.
    """
    world = World(workers=3, index_entries=LIMIT)
    seqs, truth = [0] * 3, [set[int]() for _ in range(3)]
    for worker_id, group, stores in steps:
        first = 100 * group
        blocks = range(first, first + 100)
        if stores:
            world.events(worker_id, seqs[worker_id], *(stored([n]) for n in blocks))
            truth[worker_id] |= set(blocks)
        else:
            world.events(worker_id, seqs[worker_id], *(removed([n]) for n in blocks))
            truth[worker_id] -= set(blocks)
        seqs[worker_id] += 1
        for one in range(3):
            state, held = kv(world, one), len(truth[one])
            if state.known and seqs[one]:
                assert world.core.caches.index.held(world.core.workers.get(one).slot) == held


# --- a life that nobody can prove ---------------------------------------------------------------


def reconnected_world(started_s: float = math.nan, **facts: object) -> World:
    """Return a world in which four blocks were known, and the connection was lost and came back
    without a replay.
    """
    world = World(workers=0)
    world.join(0, **facts)
    report(world, started_s)
    world.events(0, 0, stored([1, 2, 3, 4]))
    world.core.on_kv_heard(KvHeard(1.0, 0, heard=False))
    assert not kv(world).known
    world.core.on_kv_heard(KvHeard(2.0, 0, heard=False, severed=True))
    return world


def report(world: World, started_s: float, emptied: int = 0) -> None:
    fact = LoadReport(world.now_s, 0, 0, 0, math.nan, emptied, started_s)
    world.core.on_load_report(fact)


def test_a_reconnected_worker_without_a_start_time_stays_unknown() -> None:
    world = reconnected_world()
    for n in range(5):
        world.events(0, 1 + n, stored([50 + n]))
        report(world, math.nan)
    report(world, 1_000.0)
    report(world, 1_000.0)
    assert (kv(world).known, kv(world).exact, unknown(world)) == (False, False, True)
    assert world.hits([1, 2, 3, 4]) == [4]  # used, as a lower bound


def test_two_reports_of_the_same_start_time_prove_that_it_did_not_restart() -> None:
    world = reconnected_world(1_000.0)
    report(world, 1_000.0)
    report(world, 1_000.0)
    assert not kv(world).known  # batches may have been missed
    world.events(0, 1, stored([9]))
    assert kv(world).exact
    assert not unknown(world)


def test_a_gap_after_a_lost_connection_is_handled_as_any_gap() -> None:
    world = reconnected_world(1_000.0)
    world.events(0, 3, stored([9]))
    world.core.on_replay_end(ReplayEnd(3.0, 0, answered=False))
    for _ in range(3):
        report(world, 1_000.0)
    assert (kv(world).known, world.hits([1]), world.hits([9])) == (False, [0], [1])


def test_a_snapshot_a_copy_or_a_cleared_cache_makes_the_state_known() -> None:
    world = reconnected_world()
    world.events(0, 7, stored([1]), source="snapshot")
    assert kv(world).exact
    world = reconnected_world()
    world.events(0, 1, Cleared(), stored([5]))
    assert (kv(world).exact, world.hits([1])) == (True, [0])
    other = World(workers=1)
    other.events(0, 0, stored([1]))
    copy = kv(other).frozen().thawed()
    world = reconnected_world()
    world.core.on_kv_copied(KvCopied(3.0, 0, copy))
    assert kv(world).known


def test_an_unproven_state_is_copied_to_peers_as_inexact() -> None:
    frozen = kv(reconnected_world()).frozen()
    assert (frozen.exact, frozen.turned_over) == (False, False)


@pytest.mark.parametrize("cached", [0, 1, 2, 4])
def test_an_answer_with_few_hits_shows_that_the_worker_restarted(cached: int) -> None:
    world = reconnected_world()
    world.events(0, 1, stored([50]))
    arrival = world.arrival([1, 2, 3, 4, 7])
    world.core.on_arrival(arrival)
    finish = Finish(3.0, arrival.request_id, arrival.prompt_tokens, cached * BLOCK, 1)
    world.core.on_finish(finish)
    is_gone = cached < 1
    assert world.hits([1, 2, 3, 4]) == [0 if is_gone else 4]
    assert not kv(world).known
    assert kv(world).severed is not is_gone


def test_replacing_all_blocks_makes_an_unproven_cache_known_again() -> None:
    """After an unproven restart, a cache counts as known again once it was filled with new blocks
    and old ones were removed; until then old blocks for which there is no room are dropped.
    """
    world = reconnected_world(kv_capacity_tokens=8.0 * BLOCK)
    for n in range(8):  # another life: a whole cache, and none of those was removed
        world.events(0, 1 + n, stored([50 + n]))
    assert (kv(world).known, world.hits([1])) == (False, [0])
    world = reconnected_world(kv_capacity_tokens=8.0 * BLOCK)
    for n in range(4):
        world.events(0, 1 + n, stored([50 + n]))
    for n in range(4):  # the same one, which makes room as it should
        world.events(0, 5 + n, removed([1, 2, 3, 4][: 4 - n]), stored([60 + n]))
    assert (kv(world).known, kv(world).exact, kv(world).resident_blocks) == (True, False, 8)
