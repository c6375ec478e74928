"""Restarts, duplicates and replays of a stream whose batches are told apart by their digests."""

from __future__ import annotations

from policies.facts import Cleared, KvEvents, ReplayEnd
from router.core.actions import Resync
from tests.router.core_world import World, removed, stored


class Stream(World):
    """A world of one worker whose batches carry digests; `life` tells publishers apart."""

    def __init__(self, **settings: object) -> None:
        super().__init__(workers=1, **settings)
        self.life = 1

    def batch(self, seq: int, *events: object, source: str = "live") -> list:
        digest = self.life * 1000 + seq
        return self.core.on_kv_events(KvEvents(0.0, 0, seq, events, source, digest))  # type: ignore[arg-type]

    def end(self, answered: bool = True) -> list:
        return self.core.on_replay_end(ReplayEnd(0.0, 0, answered))

    @property
    def kv(self):
        return self.core.workers.get(0).kv


def test_a_batch_that_comes_twice_is_no_restart() -> None:
    stream = Stream()
    stream.batch(0, stored([1]))
    stream.batch(1, stored([2]))
    assert stream.batch(1, stored([2])) == stream.batch(0, stored([1])) == []
    assert (stream.hits([1]), stream.hits([2]), stream.kv.known) == ([1], [1], True)
    assert (stream.kv.counters.duplicates, stream.kv.counters.restarts) == (2, 0)


def test_a_batch_that_waits_and_comes_twice_is_no_restart() -> None:
    stream = Stream()
    stream.batch(0, stored([1]))
    stream.batch(2, stored([3]))
    assert stream.batch(2, stored([3])) == []
    assert (stream.kv.counters.duplicates, stream.kv.counters.restarts) == (1, 0)


def test_a_replay_is_asked_for_from_a_batch_we_would_know_again() -> None:
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]))
    assert stream.batch(5, stored([5])) == [Resync(0, 2)]
    for seq in (2, 3, 4):
        stream.batch(seq, stored([seq]), source="replay")
    assert stream.kv.known
    assert [stream.hits([n]) for n in range(6)] == [[1]] * 6


def test_a_restart_that_only_the_replay_shows_is_noticed() -> None:
    """While we were cut off the publisher began anew and came further than where it had been."""
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


def test_a_restart_after_a_replay_alone_is_noticed() -> None:
    """Nothing came live yet: the number is no duplicate, for its content is another."""
    stream = Stream()
    for seq in range(3):
        stream.batch(seq, stored([seq]), source="replay")
    stream.life = 2
    stream.batch(0, stored([10]))
    assert (stream.hits([0]), stream.hits([10]), stream.kv.known) == ([0], [1], True)


def test_a_replay_of_a_publisher_that_is_gone_does_not_reach_the_next_one() -> None:
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


def test_a_gap_that_is_filled_leaves_what_was_unknown_before_unknown() -> None:
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


def test_what_was_published_while_a_replay_was_served_is_asked_for_once_more() -> None:
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


def test_a_replay_that_begins_too_late_leaves_a_hole() -> None:
    stream = Stream()
    assert stream.batch(9, stored([9])) == [Resync(0, 0)]
    for seq in range(5, 10):
        stream.batch(seq, stored([seq]), source="replay")
    assert stream.end() == []
    assert (stream.kv.known, stream.hits([5]), stream.hits([9])) == (False, [1], [1])
    assert stream.kv.next_seq == 10


def test_a_long_replay_that_begins_too_late_is_bounded_and_quick() -> None:
    stream = Stream(backlog_batches=1000)
    for seq in range(500, 20_000):
        stream.batch(seq, removed([1]), source="replay")
    assert stream.kv.backlog_batches == 1000
    assert stream.end() == []
    assert (stream.kv.next_seq, stream.kv.backlog_batches) == (20_000, 0)
