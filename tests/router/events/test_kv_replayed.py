"""Tests of the replay of a cache that was filled before the router followed it: what is known, and
when.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from policies.facts import CacheSnapshot, KvEvents, ReplayEnd, Tick, WorkerChange, WorkerFacts
from router.core.contract.actions import Resync
from tests.router.core.core_world import BLOCK, World, stored

A_BATCH = 20  # blocks


def batches(blocks: int) -> Iterator[tuple[int, tuple]]:
    """Yield numbered batches that store `blocks` blocks, 20 at a time, each a prompt of its own."""
    for seq in range(blocks // A_BATCH):
        first = seq * A_BATCH
        yield seq, (stored(list(range(first, first + A_BATCH))),)


def digest(seq: int) -> int:
    return 1_000 + seq


def send_events(
    world: World, worker_id: int, seq: int, events: tuple, source: str = "replay"
) -> list:
    fact = KvEvents(0.0, worker_id, seq, events, source, digest(seq))  # type: ignore[arg-type]
    return world.core.on_kv_events(fact)


def cache_of(world: World, worker_id: int = 0):
    return world.core.workers.get(worker_id).kv


def working_set(world: World, worker_id: int = 0) -> float:
    return world.core.session_tracking.wanted_tokens(followed_slot(world, worker_id))


def followed_slot(world: World, worker_id: int) -> int:
    return world.core.workers.get(worker_id).slot


def test_the_cache_is_known_at_the_end_of_its_replay_and_not_before() -> None:
    world = World(workers=1)
    for seq, events in batches(200):
        assert send_events(world, 0, seq, events) == []
        assert not cache_of(world).known
        assert not cache_of(world).current  # nor held against what answers find
        assert world.core.columns.hits_unknown[followed_slot(world, 0)]
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert cache_of(world).exact
    assert not world.core.columns.hits_unknown[followed_slot(world, 0)]


def test_a_live_batch_that_continues_a_replay_ends_it() -> None:
    world = World(workers=1)
    for seq, events in batches(60):
        send_events(world, 0, seq, events)
    send_events(world, 0, 3, (stored([900]),), "live")
    assert cache_of(world).exact


def test_a_replay_that_breaks_off_is_partial_until_a_live_batch_shows_the_gap() -> None:
    world = World(workers=1)
    told = list(batches(200))
    for seq, events in told[:2]:
        send_events(world, 0, seq, events)
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=False))
    assert (cache_of(world).known, cache_of(world).resident_blocks) == (False, 2 * A_BATCH)
    assert send_events(world, 0, 10, (stored([900]),), "live") == [Resync(0, 1)]
    for seq, events in told[1:]:
        send_events(world, 0, seq, events)
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert (cache_of(world).exact, cache_of(world).resident_blocks) == (True, 201)


def test_a_replay_beyond_a_live_batch_is_partial_until_its_end() -> None:
    """A replay that continues beyond a live batch is only a part until its end, since live batches
    were lost in between.
    """
    world = World(workers=1)
    told = dict(batches(200))
    send_events(world, 0, 0, told[0], "live")
    send_events(world, 0, 3, told[3], "live")
    for seq in (1, 2):
        send_events(world, 0, seq, told[seq])
    assert cache_of(world).known  # all that was heard of is there
    send_events(world, 0, 4, told[4])
    assert not cache_of(world).known
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert cache_of(world).exact


def test_a_replay_without_batch_0_is_a_lower_bound_unless_it_fills_the_cache() -> None:
    """A replay from a buffer that begins after batch 0 gives a lower bound until the buffer holds a
    whole cache, because a part of the cache may be older.
    """
    for capacity, known in ((200, True), (1_000, False)):
        world = World(workers=0)
        world.join(0, kv_capacity_tokens=float(capacity * BLOCK))
        for seq, events in list(batches(400))[10:]:
            send_events(world, 0, seq, events)
        assert not cache_of(world).known
        world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
        assert (cache_of(world).known, cache_of(world).exact) == (known, False)


def restored(policy: str, blocks: int) -> World:
    """Return a world with a worker whose cache the previous router saved, and which events have
    confirmed since.
    """
    before = World(workers=1, policy=policy)
    for seq, events in batches(blocks):
        send_events(before, 0, seq, events, "live")
    saved: CacheSnapshot = cache_of(before).frozen().thawed()
    world = World(workers=0, policy=policy)
    facts = WorkerFacts(name="w0", models=("m",), block_size=BLOCK)
    world.core.on_worker(WorkerChange(0.0, 0, "ready", facts, saved))
    last = blocks // A_BATCH - 1
    send_events(world, 0, last, dict(batches(blocks))[last])
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    world.core.on_tick(Tick(1.0))
    return world


@pytest.mark.parametrize("blocks", [200, 6_000])
@pytest.mark.parametrize("ticks", [1, 7])
def test_working_sets_after_a_replay_equal_those_of_a_saved_cache(blocks: int, ticks: int) -> None:
    """Working sets after a replay equal those of a saved cache, for any number of ticks during the
    replay.
    """
    world = World(workers=1, policy="warmset")
    told = list(batches(blocks))
    for at, (seq, events) in enumerate(told):
        send_events(world, 0, seq, events)
        if at % (len(told) // ticks) == 0:
            world.core.on_tick(Tick(1.0))
    world.core.on_replay_end(ReplayEnd(1.0, 0, answered=True))
    world.core.on_tick(Tick(1.0))
    assert working_set(world) == pytest.approx(working_set(restored("warmset", blocks)), rel=0.01)
    assert working_set(world) == pytest.approx(blocks * BLOCK, rel=0.01)


@pytest.mark.parametrize("capacity", [100, 10_000], ids=["turned over", "a lower bound"])
def test_a_partial_replay_counts_for_working_sets(capacity: int) -> None:
    world = World(workers=0, policy="warmset")
    world.join(0, kv_capacity_tokens=float(capacity * BLOCK))
    for seq, events in list(batches(200))[5:]:
        send_events(world, 0, seq, events)
    world.core.on_tick(Tick(0.5))
    assert working_set(world) == 0.0
    world.core.on_replay_end(ReplayEnd(1.0, 0, answered=True))
    world.core.on_tick(Tick(1.0))
    assert working_set(world) == pytest.approx(100 * BLOCK, rel=0.01)
    for seq in range(10, 20):
        send_events(world, 0, seq, (stored([10_000 + seq]),), "live")
    world.core.on_tick(Tick(1.5))  # what came live since is no stranger's
    assert working_set(world) == pytest.approx(100 * BLOCK, rel=0.02)


def test_a_full_replay_after_a_partial_one_counts_again() -> None:
    world = World(workers=0, policy="warmset")
    world.join(0, kv_capacity_tokens=10_000.0 * BLOCK)
    told = list(batches(400))
    for seq, events in told[15:]:
        send_events(world, 0, seq, events)
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    world.core.on_tick(Tick(1.0))
    assert working_set(world) == pytest.approx(100 * BLOCK, rel=0.01)
    everything = tuple(event for _, events in told for event in events)
    send_events(world, 0, told[-1][0], everything, "snapshot")
    for now_s in (1.0, 1.2):
        world.core.on_tick(Tick(now_s))
        assert working_set(world) == pytest.approx(400 * BLOCK, rel=0.01)


def test_blocks_replayed_to_fill_a_gap_are_not_unowned() -> None:
    """Blocks from a replay that filled a gap do not count as unowned: all were stored since the
    cache was followed from its first batch.
    """
    world = World(workers=1, policy="warmset")
    told = dict(batches(200))
    send_events(world, 0, 0, told[0], "live")
    world.core.on_tick(Tick(0.1))
    before = working_set(world)
    for seq in range(1, 8):
        send_events(world, 0, seq, told[seq], "live")
    send_events(world, 0, 9, told[9], "live")
    send_events(world, 0, 8, told[8])
    world.core.on_replay_end(ReplayEnd(0.2, 0, answered=True))
    world.core.on_tick(Tick(0.3))
    assert working_set(world) <= before
