"""Tests of the state that the router builds from KV events: order, gaps, replays, snapshots,
restarts, orphans.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Cleared, KvEvents, LoadReport, ReplayEnd, WorkerChange
from router.core.contract.actions import Resync
from router.core.workers import kv_state as backlog_module
from router.core.workers.kv_events import WireEvents
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, removed, stored


def test_stored_blocks_are_found_and_removed_ones_are_not() -> None:
    world = World()
    world.events(0, 0, stored([1, 2, 3]))
    world.events(1, 0, stored([1, 2]))
    assert world.hits([1, 2, 3, 4]) == [3, 2, 0]
    world.events(0, 1, removed([1, 2, 3]))
    assert world.hits([1, 2, 3, 4]) == [2, 2, 0]
    world.events(0, 2, Cleared())
    assert world.hits([1, 2, 3, 4]) == [0, 2, 0]


def test_a_hole_that_is_filled_again_gives_exact_hits() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2, 3, 4]))
    world.events(0, 1, removed([1, 2]))
    assert world.hits([1, 2, 3, 4]) == [1]
    world.events(0, 2, stored([1, 2], after=1))
    assert world.hits([1, 2, 3, 4]) == [4]


def test_a_child_before_its_parent_waits_for_it() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2, 3], after=2), stored([1, 2], after=1))
    assert world.hits([1, 2, 3]) == [0]
    world.events(0, 1, stored([1]))
    assert world.hits([1, 2, 3]) == [3]
    assert world.core.workers.get(0).kv.parked_blocks == 0


def test_an_orphan_evicted_before_its_parent_stays_evicted() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2, 3], after=1))
    world.events(0, 1, removed([1, 2, 3]))
    world.events(0, 2, stored([1]))
    assert world.hits([1, 2, 3]) == [2]


def test_the_number_of_parked_blocks_is_bounded() -> None:
    world = World(workers=1, parked_blocks=3)
    world.events(0, 0, stored([1, 2, 3], after=1), stored([5, 6, 7], after=1))
    kv = world.core.workers.get(0).kv
    assert (kv.parked_blocks, kv.counters.skipped_events) == (2, 1)


def test_a_gap_requests_a_replay_and_keeps_later_batches() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1]))
    assert world.events(0, 3, removed([1, 2])) == [Resync(0, 1)]
    assert world.events(0, 4, stored([9])) == []  # asked already
    kv = world.core.workers.get(0).kv
    assert not kv.known
    world.events(0, 1, stored([1, 2], after=1), source="replay")
    world.events(0, 2, stored([1, 2, 3], after=2), source="replay")
    assert kv.known
    assert world.hits([1, 2, 3]) == [1]  # block 2 went in batch 3, after it was stored in 1
    assert world.hits([9]) == [1]
    world.events(0, 3, removed([1, 2]), source="replay")
    assert kv.counters.duplicates == 1


def test_a_gap_without_a_replay_makes_the_state_unknown() -> None:
    world = World(workers=0)
    world.join(0, kv_capacity_tokens=16.0)  # four blocks
    world.events(0, 0, stored([1, 2]))
    assert world.events(0, 5, stored([7])) == [Resync(0, 1)]
    world.core.on_replay_end(ReplayEnd(1.0, 0, answered=False))
    kv = world.core.workers.get(0).kv
    assert (kv.known, world.hits([1, 2]), world.hits([7])) == (False, [0], [1])
    assert world.core.columns.hits_unknown[world.core.workers.get(0).slot]
    world.events(0, 6, stored([20, 21, 22]))
    assert (kv.known, kv.exact) == (True, False)  # 1 and 2 may be there, had they been hit
    assert not world.core.columns.hits_unknown[world.core.workers.get(0).slot]
    world.events(0, 9, stored([30]))
    assert not kv.known
    world.core.on_replay_end(ReplayEnd(1.0, 0, answered=False))
    assert not kv.known
    world.events(0, 10, Cleared())
    assert (kv.known, kv.exact) == (True, True)


def test_a_late_subscriber_uses_a_snapshot_and_the_batches_after_it() -> None:
    world = World(workers=1)
    assert world.events(0, 41, stored([5])) == [Resync(0, 0)]
    world.events(0, 42, stored([6]))
    world.events(0, 41, stored([1, 2]), stored([5]), source="snapshot")
    kv = world.core.workers.get(0).kv
    assert kv.known
    assert (world.hits([1, 2]), world.hits([5]), world.hits([6])) == ([2], [1], [1])


def test_a_worker_that_never_published_is_known_to_be_empty() -> None:
    world = World(workers=1)
    world.events(0, -1, source="snapshot")
    assert world.core.workers.get(0).kv.known
    other = World(workers=1)
    other.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert other.core.workers.get(0).kv.known


def test_a_restarted_publisher_starts_from_an_empty_cache() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1]))
    world.events(0, 1, stored([2]))
    world.events(0, 0, stored([3]))
    assert (world.hits([1]), world.hits([2]), world.hits([3])) == ([0], [0], [1])
    assert world.core.workers.get(0).kv.counters.restarts == 1


def test_the_backlog_of_batches_is_bounded() -> None:
    world = World(workers=1, backlog_batches=2)
    for seq in range(5, 10):
        world.events(0, seq, stored([seq]))
    kv = world.core.workers.get(0).kv
    assert kv.counters.dropped_batches == 3
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert (world.hits([8]), world.hits([9])) == ([1], [1])


@settings(max_examples=examples(100), deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=60),
    limit=st.integers(1, 6),
)
def test_a_backlog_keeps_the_latest_batches_within_both_bounds(
    steps: list[tuple[int, int, bool]], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backlog_module, "MAX_BYTES", 50)
        backlog, kept = backlog_module.Backlog(limit), {}
        for seq, size, take in steps:
            if take:
                batch = backlog.pop(seq)
                assert (batch is None) == (seq not in kept)
                kept.pop(seq, None)
                continue
            kept[seq] = size
            dropped = 0
            while len(kept) > limit or (sum(kept.values()) > 50 and len(kept) > 1):
                del kept[min(kept)]
                dropped += 1
            events = WireEvents((), "m", size)
            assert backlog.keep(KvEvents(0.0, 0, seq, events, "live", 1 + seq)) == dropped
            assert len(backlog) == len(kept)
            assert backlog.first_seq == min(kept)
            assert len(backlog._seqs) <= 10


def test_other_block_sizes_are_skipped_and_tiers_are_separate() -> None:
    world = World(workers=1)
    event = stored([1])
    partial = type(event)(event.hashes, None, event.tokens[:2], 2)
    on_host = type(event)(event.hashes, None, event.tokens, event.block_size, tier="host")
    world.events(0, 0, partial, on_host)
    kv = world.core.workers.get(0).kv
    assert world.hits([1]) == [0]
    assert (kv.counters.skipped_events, len(kv.chains(0)), len(kv.chains(1))) == (1, 0, 1)
    world.events(0, 1, type(event)(event.hashes, None, (), BLOCK))  # loaded back: known by name
    assert world.hits([1]) == [1]
    world.events(0, 2, removed([1]))
    assert (len(kv.chains(0)), len(kv.chains(1))) == (0, 1)


_history = st.lists(
    st.tuples(st.sampled_from(["store", "evict"]), st.integers(0, 3), st.integers(1, 5)),
    max_size=30,
)


@settings(max_examples=examples(100), deadline=None)
@given(history=_history, lost=st.sets(st.integers(0, 29)))
def test_a_replay_makes_the_state_exact_after_any_loss(history, lost) -> None:
    """A replay makes the state exact, whatever batches of a random history were lost."""
    truth: set[tuple[int, ...]] = set()
    batches = []
    for kind, family, depth in history:
        chain = [family * 10 + i for i in range(depth)]
        held = max((d for d in range(1, depth + 1) if tuple(chain[:d]) in truth), default=0)
        if kind == "store" and held < depth:
            truth |= {tuple(chain[: d + 1]) for d in range(held, depth)}
            batches.append((stored(chain, after=held),))
        elif kind == "evict" and tuple(chain) in truth:
            truth.discard(tuple(chain))
            batches.append((removed(chain),))
    batches.append(())  # never lost: it shows that batches before it are missing
    world = World(workers=1)
    for seq, events in enumerate(batches):
        if seq in lost and seq < len(batches) - 1:
            continue
        for resync in world.events(0, seq, *events):
            for missed in range(resync.from_seq, seq):
                world.events(0, missed, *batches[missed], source="replay")
            world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert world.core.workers.get(0).kv.known
    for family in range(4):
        chain = [family * 10 + i for i in range(5)]
        expected = 0
        while expected < 5 and tuple(chain[: expected + 1]) in truth:
            expected += 1
        assert world.hits(chain) == [expected], (family, batches)


def test_an_old_snapshot_is_used_if_the_state_is_unknown() -> None:
    world = World(workers=1)
    world.events(0, 7, stored([1]))  # a late joiner: nobody answers at first
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=False))
    kv = world.core.workers.get(0).kv
    assert not kv.known
    resync = world.events(0, 5, stored([8, 9]), source="snapshot")
    assert resync == [Resync(0, 6)]
    world.events(0, 6, stored([5]), source="replay")
    world.events(0, 7, stored([1]), source="replay")
    assert kv.known
    assert (world.hits([8, 9]), world.hits([5]), world.hits([1])) == ([2], [1], [1])


def test_blocks_that_are_never_removed_are_bounded() -> None:
    world = World(workers=1, index_entries=1024)
    for seq in range(2000):
        world.events(0, seq, stored([seq]))
    kv = world.core.workers.get(0).kv
    assert kv.resident_blocks <= 1024
    assert (kv.counters.overflows, kv.known) == (1, False)


def test_evicted_orphans_make_room_for_other_orphans() -> None:
    """Evicted orphans make room for others: after a gap that is never filled, children of missed
    blocks are kept aside and evicted all the time.
    """
    world = World(workers=1, parked_blocks=16)
    for n in range(100):
        chain = [n, 1000 + n, 2000 + n]
        world.events(0, 2 * n, stored(chain, after=1))
        world.events(0, 2 * n + 1, removed(chain, last=2))
    kv = world.core.workers.get(0).kv
    assert kv.parked_blocks <= 16
    assert kv.counters.skipped_events == 0
    world.events(0, 200, stored([7, 8], after=1))
    world.events(0, 201, stored([7]))
    assert world.hits([7, 8]) == [2]


def test_a_worker_that_was_down_holds_no_blocks_until_a_snapshot() -> None:
    world = World(workers=2)
    for worker_id in (0, 1):
        world.events(worker_id, 0, stored([1, 2, 3]))
    world.core.on_worker(WorkerChange(1.0, 0, "down"))
    assert world.hits([1, 2, 3]) == [0, 3]
    world.core.on_worker(WorkerChange(2.0, 0, "ready"))
    worker = world.core.workers.get(0)
    assert world.core.columns.hits_unknown[worker.slot]
    assert world.events(0, 4, stored([5])) == [Resync(0, 0)]
    world.events(0, 4, stored([1]), stored([5]), source="snapshot")
    assert world.hits([1, 2, 3]) == [1, 3]
    assert not world.core.columns.hits_unknown[worker.slot]


def test_new_thresholds_do_not_change_the_known_blocks() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2, 3]))
    world.join(0, max_requests=3.0)
    assert world.hits([1, 2, 3]) == [3]
    assert world.core.columns.max_requests[world.core.workers.get(0).slot] == 3.0
    world.join(0, max_requests=3.0, kv_capacity_tokens=1600.0)  # another engine
    assert world.hits([1, 2, 3]) == [0]


def report_resets(world: World, times: int, running: int = 0) -> None:
    world.core.on_load_report(LoadReport(world.now_s, 0, running, 0, math.nan, times))


def test_a_cache_reset_without_an_event_empties_the_known_blocks() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2]))
    report_resets(world, 5)  # before we came
    assert world.hits([1, 2]) == [2]
    report_resets(world, 5)
    assert world.hits([1, 2]) == [2]
    world.core.on_arrival(world.arrival([1, 2]))
    report_resets(world, 6)
    kv = world.core.workers.get(0).kv
    assert (world.hits([1, 2]), kv.known, len(world.core.caches.speculative)) == ([0], False, 0)
    world.events(0, 1, Cleared(), stored([3]))
    assert (world.hits([3]), kv.known) == ([1], True)
    report_resets(world, 6)
    assert (world.hits([3]), kv.known) == ([1], True)


def test_a_cache_reset_with_an_event_is_applied_once() -> None:
    for reports in (0, 1):  # between the event and the report that counts it
        world = World(workers=1)
        for _ in range(3):
            report_resets(world, 5)
        world.events(0, 0, stored([1, 2]))
        world.events(0, 1, Cleared(), stored([3]))
        for _ in range(reports):
            report_resets(world, 5)
        report_resets(world, 6)
        assert (world.hits([3]), world.core.workers.get(0).kv.known) == ([1], True)
        for _ in range(2):
            report_resets(world, 6)
        report_resets(world, 7)
        assert world.hits([3]) == [0]


def test_a_reported_reset_of_a_busy_engine_is_ignored() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2]))
    report_resets(world, 5)
    report_resets(world, 6, running=1)
    report_resets(world, 6)
    assert world.hits([1, 2]) == [2]


def test_a_reset_counter_that_restarts_at_0_does_not_empty_the_cache() -> None:
    world = World(workers=1)
    world.events(0, 0, stored([1, 2]))
    report_resets(world, 5)
    report_resets(world, 0)
    assert world.hits([1, 2]) == [2]
    report_resets(world, 1)
    assert world.hits([1, 2]) == [0]


def test_a_cache_reset_empties_a_mirrored_cache() -> None:
    world = World(workers=0)
    world.join(0, has_events=False)
    world.core.on_arrival(world.arrival([1, 2]))
    report_resets(world, 0)
    report_resets(world, 1)
    assert len(world.core.caches.mirrors) == 0
