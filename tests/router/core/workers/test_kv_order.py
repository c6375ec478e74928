"""Tests of restarts, duplicates and replays of a stream whose batches have digests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.facts import Cleared, KvEvents, ReplayEnd, WorkerChange
from router.core.contract.actions import Resync
from tests.router.core.core_world import World, removed, stored


class Stream(World):
    """A world with one worker whose batches of events have digests; `life` distinguishes restarts
    of the publisher.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(workers=1, **settings)
        self.life = 1

    def batch(self, seq: int, *events: object, source: str = "live") -> list:
        digest = self.life * 1000 + seq
        fact = KvEvents(0.0, 0, seq, events, source, digest)  # type: ignore[arg-type]
        return self.core.on_kv_events(fact)

    def end(self, answered: bool = True) -> list:
        return self.core.on_replay_end(ReplayEnd(0.0, 0, answered))

    @property
    def kv(self):
        return self.core.workers.get(0).kv


def test_a_duplicate_batch_is_no_restart() -> None:
    stream = Stream()
    stream.batch(0, stored([1]))
    stream.batch(1, stored([2]))
    assert stream.batch(1, stored([2])) == stream.batch(0, stored([1])) == []
    assert (stream.hits([1]), stream.hits([2]), stream.kv.known) == ([1], [1], True)
    assert (stream.kv.counters.duplicates, stream.kv.counters.restarts) == (2, 0)


def test_a_duplicate_of_a_waiting_batch_is_no_restart() -> None:
    stream = Stream()
    stream.batch(0, stored([1]))
    stream.batch(2, stored([3]))
    assert stream.batch(2, stored([3])) == []
    assert (stream.kv.counters.duplicates, stream.kv.counters.restarts) == (1, 0)


def test_a_replay_is_requested_from_the_last_known_batch() -> None:
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]))
    assert stream.batch(5, stored([5])) == [Resync(0, 2)]
    for seq in (2, 3, 4):
        stream.batch(seq, stored([seq]), source="replay")
    assert stream.kv.known
    assert [stream.hits([n]) for n in range(6)] == [[1]] * 6


def test_a_restart_that_only_the_replay_shows_is_detected() -> None:
    """A publisher's restart that only the replay shows is noticed: it restarted and passed its
    former number while the connection was lost.
    """
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]))
    stream.life = 2
    assert stream.batch(5, stored([15])) == [Resync(0, 2)]
    assert stream.batch(2, stored([12]), source="replay") == [Resync(0, 0)]
    assert [stream.hits([n]) for n in range(3)] == [[0]] * 3
    for seq in (3, 4, 5):  # the rest of that replay waits for what comes before
        stream.batch(seq, stored([10 + seq]), source="replay")
    for seq in range(6):
        stream.batch(seq, stored([10 + seq]), source="replay")
    assert stream.kv.known
    assert [stream.hits([10 + n]) for n in range(6)] == [[1]] * 6
    assert stream.kv.counters.restarts == 1


def test_a_restart_after_only_a_replay_is_detected() -> None:
    """A restart is noticed when only a replay has come so far: the first live batch is no
    duplicate, because its content differs.
    """
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]), source="replay")
    stream.life = 2
    stream.batch(0, stored([10]))
    assert (stream.hits([0]), stream.hits([10]), stream.kv.known) == ([0], [1], True)


def test_a_replay_from_before_a_restart_does_not_affect_the_new_stream() -> None:
    stream = Stream()
    stream.batch(0, stored([0]))
    assert stream.batch(4, stored([4])) == [Resync(0, 0)]
    stream.batch(1, stored([1]), source="replay")
    stream.life = 2
    assert stream.batch(0, stored([10])) == []
    stream.life = 1
    assert stream.batch(2, stored([2]), source="replay") == []  # on its way since before
    assert stream.batch(3, stored([3]), source="replay") == []
    stream.life = 2
    assert stream.batch(2, stored([12])) == [Resync(0, 0)]
    for seq in range(3):
        stream.batch(seq, stored([10 + seq]), source="replay")
    assert stream.kv.known
    assert [stream.hits([n]) for n in range(5)] == [[0]] * 5
    assert [stream.hits([10 + n]) for n in range(3)] == [[1]] * 3


def test_filling_a_gap_does_not_make_an_unknown_state_known() -> None:
    stream = Stream()
    assert stream.batch(7, stored([7])) == [Resync(0, 0)]
    assert stream.end(answered=False) == []
    assert not stream.kv.known
    assert stream.batch(9, stored([9])) == [Resync(0, 7)]
    stream.batch(7, stored([7]), source="replay")
    stream.batch(8, stored([8]), source="replay")
    assert stream.end() == []
    assert not stream.kv.known
    stream.batch(10, Cleared())
    assert stream.kv.known


def test_batches_published_during_a_replay_are_requested_again() -> None:
    stream = Stream()
    stream.batch(0, stored([0]))
    stream.batch(2, stored([2]))
    stream.batch(4, stored([4]))  # 3 was lost, and the replay was served before it was published
    stream.batch(1, stored([1]), source="replay")
    stream.batch(2, stored([2]), source="replay")
    assert stream.end() == [Resync(0, 2)]
    stream.batch(2, stored([2]), source="replay")
    stream.batch(3, stored([3]), source="replay")
    assert stream.end() == []
    assert stream.kv.known
    assert [stream.hits([n]) for n in range(5)] == [[1]] * 5


def test_a_replay_that_begins_too_late_leaves_the_state_unknown() -> None:
    stream = Stream()
    assert stream.batch(9, stored([9])) == [Resync(0, 0)]
    for seq in range(5, 10):
        stream.batch(seq, stored([seq]), source="replay")
    assert stream.end() == []
    assert (stream.kv.known, stream.hits([5]), stream.hits([9])) == (False, [1], [1])
    assert stream.kv.next_seq == 10


def test_the_backlog_of_a_long_late_replay_is_bounded() -> None:
    stream = Stream(backlog_batches=1000)
    for seq in range(500, 20_000):
        stream.batch(seq, removed([1]), source="replay")
    assert stream.kv.backlog_batches == 1000
    assert stream.end() == []
    assert (stream.kv.next_seq, stream.kv.backlog_batches) == (20_000, 0)


# --- from one router to the next ----------------------------------------------------------------


def followed() -> Stream:
    """Return a stream with three batches, whose state is known."""
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]))
    return stream


def taken_over(before: Stream, **changed: object) -> Stream:
    """Return a router that starts from the state that the router `before` saved."""
    frozen = before.kv.frozen()
    assert frozen is not None
    saved = frozen.thawed()
    after = Stream()
    after.life = before.life
    after.core.on_worker(WorkerChange(0.0, 0, "gone"))
    spec = before.core.workers.get(0).facts
    saved = replace(saved, **changed)
    after.core.on_worker(WorkerChange(0.0, 0, "ready", spec, saved))
    return after


def holds(stream: Stream, *blocks: int) -> bool:
    return all(stream.hits([block]) == [1] for block in blocks)


def test_an_incomplete_saved_state_is_replaced_by_a_snapshot() -> None:
    after = taken_over(followed(), exact=False)
    assert holds(after, 0, 1, 2)
    assert after.core.caches.first_question(0) == 0  # a feed takes the snapshot first
    after.batch(2, stored([1]), stored([2]), stored([7]), source="snapshot")
    assert after.kv.exact
    assert after.hits([0]) == [0]
    assert holds(after, 1, 2, 7)


def test_a_saved_stream_continues_once_its_last_batch_is_replayed() -> None:
    after = taken_over(followed())
    assert after.core.caches.first_question(0) == 2
    assert holds(after, 0, 1, 2)  # used at once, as a lower bound
    assert not after.kv.known
    assert after.core.columns.hits_unknown[0]
    assert after.batch(4, stored([4])) == []  # waits
    assert after.hits([4]) == [0]
    for seq in (2, 3, 4):
        after.batch(seq, stored([seq]), source="replay")
    assert holds(after, 0, 1, 2, 3, 4)
    assert after.kv.known
    assert after.end() == []
    assert after.kv.known


def test_a_saved_lower_bound_stays_a_lower_bound() -> None:
    before = Stream()
    before.batch(7, stored([7]))
    before.end(answered=False)
    after = taken_over(before)
    after.batch(7, stored([7]), source="replay")
    after.end()
    assert holds(after, 7)
    assert not after.kv.known


def test_the_saved_state_is_dropped_if_the_engine_restarted() -> None:
    after = taken_over(followed())
    after.life = 2
    assert after.batch(2, stored([12]), source="replay") == [Resync(0, 0)]
    assert after.hits([1]) == [0]
    for seq in range(3):
        after.batch(seq, stored([10 + seq]), source="replay")
    assert after.kv.known
    assert holds(after, 10, 11, 12)


@pytest.mark.parametrize("replayed", [[], [5, 6]])
def test_the_saved_state_is_dropped_if_the_replay_lacks_its_last_batch(replayed: list[int]) -> None:
    """A replay that lacks the saved batch proves nothing: the engine restarted and has not come
    that far, or its buffer is too short.
    """
    after = taken_over(followed())
    for seq in replayed:
        after.batch(seq, stored([seq]), source="replay")
    assert after.end() == [Resync(0, 0)]
    assert not holds(after, 1)
    for seq in replayed:
        after.batch(seq, stored([seq]), source="replay")
    assert after.end() == []
    assert after.kv.known == (not replayed)
    assert holds(after, *replayed)


def test_the_saved_state_is_dropped_if_no_replay_is_answered() -> None:
    after = taken_over(followed())
    assert after.batch(3, stored([3])) == []
    assert after.end(answered=False) == []
    assert (holds(after, 1), holds(after, 3), after.kv.known) == (False, True, False)


def test_a_snapshot_replaces_the_saved_state() -> None:
    after = taken_over(followed())
    after.batch(1, stored([21]), source="snapshot")
    assert (holds(after, 21), holds(after, 1), after.kv.known) == (True, False, True)


@pytest.mark.parametrize("blocks", [b"", b"garbage"])
def test_damaged_saved_blocks_cause_a_cold_start(blocks: bytes) -> None:
    after = taken_over(followed(), blocks=blocks)
    assert (after.core.caches.first_question(0), after.kv.resident_blocks) == (0, 0)
    after.batch(0, stored([0]))
    assert after.kv.known


def test_a_state_that_is_unproven_or_has_no_digest_is_not_saved() -> None:
    assert Stream().kv.frozen().digest == 0
    assert taken_over(followed()).kv.frozen() is None
    plain = World(workers=1)
    plain.events(0, 0, stored([1]))
    assert plain.core.workers.get(0).kv.frozen().digest == 0


def test_a_worker_that_was_down_before_its_proof_holds_no_blocks() -> None:
    after = taken_over(followed())
    after.core.on_worker(WorkerChange(1.0, 0, "down"))
    after.core.on_worker(WorkerChange(2.0, 0, "ready"))
    assert (holds(after, 1), after.core.caches.first_question(0)) == (False, 0)
