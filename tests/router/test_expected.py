"""Blocks expected because of our own dispatches: believed for a while, forgotten in two halves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Cleared, Finish, Tick, WorkerChange
from router.core.mirror import ExpectedBlocks
from tests.router.core_world import World, chain_of, stored
from tests.router.property_support import patient

TTL_S = 10.0


def raised(expected: ExpectedBlocks, blocks: list[int], *resident: int) -> list[int]:
    """Leading blocks per slot, where `resident` are there already."""
    hits = np.array(resident, dtype=np.int32)
    expected.raise_prefix(hits, chain_of(blocks))
    return hits.tolist()


def held(expected: ExpectedBlocks, blocks: list[int]) -> int:
    return raised(expected, blocks, 0)[0]


def test_what_is_expected_is_believed_at_once_by_its_worker_only() -> None:
    expected = ExpectedBlocks(2, 1024, TTL_S)
    expected.expect(1, chain_of([1, 2, 3]), 0.0)
    assert raised(expected, [1, 2, 3, 4], 0, 0) == [0, 3]


def test_both_generations_count_and_neither_lowers_what_is_resident() -> None:
    expected = ExpectedBlocks(4, 1024, TTL_S)
    expected.expect(1, chain_of([1, 2, 3]), 0.0)
    expected.expect(2, chain_of([1, 2]), TTL_S / 2)
    assert raised(expected, [1, 2, 3, 4], 1, 1, 1, 4) == [1, 3, 2, 4]


@patient
@given(
    steps=st.lists(st.floats(0.0, 4.0), min_size=1, max_size=30),
    asked_s=st.floats(0.0, 3 * TTL_S),
)
def test_a_block_is_believed_for_half_its_time_at_least_and_all_of_it_at_most(
    steps: list[float], asked_s: float
) -> None:
    """Whenever ticks come, as long as they come at least every 4 s."""
    expected = ExpectedBlocks(1, 1024, TTL_S)
    now_s = 0.0
    for step_s in steps:
        now_s += step_s
        expected.expire(now_s)
    expected.expect(0, chain_of([1]), now_s)
    since_s = 0.0
    while since_s < asked_s:
        since_s = min(since_s + 4.0, asked_s)
        expected.expire(now_s + since_s)
    if asked_s < TTL_S / 2:
        assert held(expected, [1]) == 1
    elif asked_s > TTL_S + 4.0:
        assert held(expected, [1]) == 0
        assert len(expected) == 0


def test_a_long_silence_forgets_both_generations() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    expected.expect(0, chain_of([1]), 0.0)
    expected.expire(TTL_S)
    assert len(expected) == 0


def test_a_clock_that_goes_back_forgets_nothing_and_recovers() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    expected.expect(0, chain_of([1]), 100.0)
    expected.expire(50.0)
    assert held(expected, [1]) == 1
    expected.expire(100.0 + TTL_S)
    assert held(expected, [1]) == 0


def test_each_generation_is_bounded() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    for n in range(40):
        chain = np.arange(n * 100, (n + 1) * 100, dtype=np.uint64)
        expected.expect(0, chain, n * 0.01)
    assert len(expected) <= 2 * 1024


def expected_hit(world: World, blocks: list[int], worker_id: int) -> int:
    """Tokens the core expects `worker_id` to hold of this prompt."""
    choice = world.core.explain(world.arrival(blocks, now_s=world.now_s))
    assert choice is not None
    return next(c.hit_tokens for c in choice.decision.candidates if c.worker_id == worker_id)


def test_a_worker_without_events_is_mirrored_until_it_goes_down() -> None:
    world = World(workers=0)
    world.join(0, has_events=False)
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    world.core.on_finish(Finish(0.0, arrival.request_id, prompt_tokens=12))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 12
    world.now_s = 3600.0  # long after an unconfirmed block of a worker with events would be gone
    world.core.on_tick(Tick(3600.0))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 12
    world.core.on_worker(WorkerChange(3601.0, 0, "down"))
    world.core.on_worker(WorkerChange(3602.0, 0, "ready"))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 0


def test_an_unconfirmed_block_of_a_worker_with_events_is_soon_forgotten() -> None:
    world = World(workers=1, speculative_s=10.0)
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    world.core.on_finish(Finish(0.0, arrival.request_id))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 12
    for second in range(1, 11):
        world.now_s = float(second)
        world.core.on_tick(Tick(world.now_s))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 0


def test_a_reset_cache_holds_nothing_that_was_expected_of_it() -> None:
    world = World(workers=2)
    for blocks in ([1, 2, 3], [4, 5, 6]):
        arrival = world.arrival(blocks)
        world.core.on_arrival(arrival)
        world.core.on_finish(Finish(0.0, arrival.request_id))
    hits = [
        [expected_hit(world, [*blocks, 9], w) for w in (0, 1)] for blocks in ([1, 2, 3], [4, 5, 6])
    ]
    assert sorted(hits) == [[0, 12], [12, 0]]
    world.events(0, 0, Cleared(), stored([7, 8]))
    assert expected_hit(world, [1, 2, 3, 9], 0) == expected_hit(world, [4, 5, 6, 9], 0) == 0
    assert expected_hit(world, [7, 8, 9], 0) == 8
    assert {expected_hit(world, [1, 2, 3, 9], 1), expected_hit(world, [4, 5, 6, 9], 1)} == {0, 12}
