"""Tests of blocks that the router expects at a worker because of its own requests: they are assumed
for a while, then forgotten in two halves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Cleared, Fact, Failure, Finish, FirstToken, Tick, WorkerChange
from router.core.core import take
from router.core.workers.mirror import Expectation, ExpectedBlocks
from tests.router.core.core_world import BLOCK, World, chain_of, names_of, removed, stored
from tests.router.property_support import patient

TTL_S = 10.0


def raised(expected: ExpectedBlocks, blocks: list[int], *resident: int) -> list[int]:
    """Return the number of expected leading blocks of each worker if `resident` are
    cached already.
    """
    hits = np.array(resident, dtype=np.int32)
    expected.raise_prefix(hits, chain_of(blocks))
    return hits.tolist()


def held(expected: ExpectedBlocks, blocks: list[int]) -> int:
    return raised(expected, blocks, 0)[0]


def test_expected_blocks_count_at_once_and_only_for_their_worker() -> None:
    expected = ExpectedBlocks(2, 1024, TTL_S)
    expected.expect(1, chain_of([1, 2, 3]), 0.0)
    assert raised(expected, [1, 2, 3, 4], 0, 0) == [0, 3]


def test_both_generations_count_and_do_not_lower_resident_hits() -> None:
    expected = ExpectedBlocks(4, 1024, TTL_S)
    expected.expect(1, chain_of([1, 2, 3]), 0.0)
    expected.expect(2, chain_of([1, 2]), TTL_S / 2)
    assert raised(expected, [1, 2, 3, 4], 1, 1, 1, 4) == [1, 3, 2, 4]


@patient
@given(
    steps=st.lists(st.floats(0.0, 4.0), min_size=1, max_size=30),
    asked_s=st.floats(0.0, 3 * TTL_S),
)
def test_an_expected_block_lasts_between_half_its_ttl_and_its_ttl(
    steps: list[float], asked_s: float
) -> None:
    """An expected block is assumed for at least half of its time and at most all of it, for any
    times of ticks at most 4 s apart.
    """
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


def test_both_generations_expire_after_a_long_pause() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    expected.expect(0, chain_of([1]), 0.0)
    expected.expire(TTL_S)
    assert len(expected) == 0


def test_a_clock_that_goes_back_removes_no_expected_blocks() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    expected.expect(0, chain_of([1]), 100.0)
    expected.expire(50.0)
    assert held(expected, [1]) == 1
    expected.expire(100.0 + TTL_S)
    assert held(expected, [1]) == 0


def test_the_size_of_each_generation_is_bounded() -> None:
    expected = ExpectedBlocks(1, 1024, TTL_S)
    for n in range(40):
        chain = np.arange(n * 100, (n + 1) * 100, dtype=np.uint64)
        expected.expect(0, chain, n * 0.01)
    assert len(expected) <= 2 * 1024


PROMPTS = [[1], [1, 2], [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6, 7], [8, 2, 3]]


@patient
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["expect", "expect", "answered", "failed", "gone", "clear"]),
            st.integers(0, 1),
            st.sampled_from(PROMPTS),
            st.integers(0, 30),
        ),
        max_size=30,
    )
)
def test_blocks_of_a_failed_request_are_expected_only_if_others_share_them(
    steps: list[tuple[str, int, list[int], int]],
) -> None:
    """The blocks of a failed request are expected only as far as other requests bring them; the
    test compares with sets of blocks, without passing time.
    """
    expected = ExpectedBlocks(2, 1024, TTL_S)
    believed: tuple[set[int], set[int]] = set(), set()
    running: list[Expectation] = []
    for what, slot, prompt, which in steps:
        chain = chain_of(prompt)
        if what == "expect":
            running.append(expected.expect(slot, chain, 0.0))
            believed[slot].update(chain.tolist())
        elif what == "gone":
            expected.drop(slot, chain[which % len(chain) :])
            believed[slot].difference_update(chain[which % len(chain) :].tolist())
        elif what == "clear":
            expected.clear_worker(slot)
            believed[slot].clear()
            running = [one for one in running if one.slot != slot]
        elif running:
            one = running.pop(which % len(running))
            expected.ended(one, failed=what == "failed")
            if what == "failed":
                others = {b for o in running if o.slot == one.slot for b in o.chain.tolist()}
                believed[one.slot].difference_update(set(one.chain.tolist()) - others)
        for prompt in PROMPTS:
            there = [
                [block in blocks for block in chain_of(prompt).tolist()] for blocks in believed
            ]
            leading = [([*row, False]).index(False) for row in there]
            assert raised(expected, prompt, 0, 0) == leading


def expected_hit(world: World, blocks: list[int], worker_id: int) -> int:
    """Return the tokens of this prompt that the core expects `worker_id` to hold."""
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


def test_an_unconfirmed_block_of_a_worker_with_events_expires_soon() -> None:
    world = World(workers=1, speculative_s=10.0)
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    world.core.on_finish(Finish(0.0, arrival.request_id))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 12
    for second in range(1, 11):
        world.now_s = float(second)
        world.core.on_tick(Tick(world.now_s))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 0


REFUSED = [Finish(0.1, 1, refused=True)]
NO_CONNECTION = [Failure(0.1, 1, "worker", reason="connect")]
LEFT_EARLY = [Failure(0.1, 1, "client")]
LEFT_LATER = [FirstToken(0.1, 1), Failure(0.2, 1, "client")]


@pytest.mark.parametrize(
    ("facts", "stream", "hit_tokens"),
    [
        (REFUSED, True, 0),
        (REFUSED, False, 0),
        (NO_CONNECTION, True, 0),
        (LEFT_EARLY, True, 0),
        (LEFT_EARLY, False, 0),
        (LEFT_LATER, True, 12),
        ([Finish(0.1, 1, prompt_tokens=12)], False, 12),
    ],
)
@pytest.mark.parametrize("has_events", [True, False], ids=["events", "mirrored"])
def test_a_request_that_was_never_computed_leaves_no_expected_blocks(
    facts: list[Fact], stream: bool, hit_tokens: int, has_events: bool
) -> None:
    world = World(workers=0)
    world.join(0, has_events=has_events)
    world.core.on_arrival(world.arrival([1, 2, 3], stream=stream))
    assert expected_hit(world, [1, 2, 3, 4], 0) == 12
    for fact in facts:
        take(world.core, fact)
    assert expected_hit(world, [1, 2, 3, 4], 0) == hit_tokens


def test_a_late_refusal_leaves_no_expected_blocks() -> None:
    """A refusal that comes long after the prompt could have been computed ends all expectations of
    the request: an unstreamed request leaves the modelled queue at its time, whatever the worker
    does.
    """
    for has_events in (True, False):
        world = World(workers=0)
        world.join(0, has_events=has_events)
        world.core.on_arrival(world.arrival([1, 2, 3], stream=False))
        world.core.on_tick(Tick(60.0))
        world.core.on_finish(Finish(60.0, 1, refused=True))
        world.now_s = 60.0
        assert expected_hit(world, [1, 2, 3, 4], 0) == 0


def test_a_sibling_of_a_refused_request_keeps_the_shared_expected_blocks() -> None:
    world = World(workers=1)
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6]):
        world.core.on_arrival(world.arrival(prompt))
    world.core.on_finish(Finish(0.1, 1, refused=True))
    assert expected_hit(world, [1, 2, 3, 4, 9], 0) == 8
    assert expected_hit(world, [1, 2, 5, 6, 9], 0) == 16


def test_a_block_that_was_stored_and_evicted_is_no_longer_expected() -> None:
    """A block that a worker stored and evicted is no longer expected, whether or not the request
    that brought it still runs.
    """
    world = World(workers=1)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        world.core.on_arrival(world.arrival(prompt))
    world.core.on_finish(Finish(0.1, 1))
    world.events(0, 0, stored([1, 2, 3]), stored([4, 5, 6]))
    assert expected_hit(world, [1, 2, 3, 9], 0) == expected_hit(world, [4, 5, 6, 9], 0) == 12
    world.events(0, 1, removed([1, 2, 3]), removed([4, 5, 6], last=2))
    assert expected_hit(world, [1, 2, 3, 9], 0) == 8
    assert expected_hit(world, [4, 5, 6, 9], 0) == 4
    world.events(0, 2, stored([1, 2, 3], after=2))
    assert expected_hit(world, [1, 2, 3, 9], 0) == 12


def test_an_eviction_from_another_tier_does_not_end_the_expectation() -> None:
    world = World(workers=1)
    world.core.on_arrival(world.arrival([1, 2, 3]))
    event = stored([1, 2, 3])
    world.events(0, 0, event, replace(event, tier="host"))
    world.events(0, 1, replace(removed([1, 2, 3], last=3), tier="host"))
    assert expected_hit(world, [1, 2, 3, 9], 0) == 12
    world.events(0, 2, removed([1, 2, 3], last=3))
    assert expected_hit(world, [1, 2, 3, 9], 0) == 0


@patient
@given(
    facts=st.lists(
        st.tuples(
            st.sampled_from(["arrives", "arrives", "ends", "ends", "refused", "stored", "removed"]),
            st.sampled_from(PROMPTS),
            st.integers(0, 30),
        ),
        min_size=20,
        max_size=60,
    )
)
def test_blocks_beyond_the_events_are_expected_only_from_running_requests(
    facts: list[tuple[str, list[int], int]],
) -> None:
    """More blocks than events report are expected only while requests run: a worker that computes
    its requests at once holds what is expected.
    """
    world, held, seq = World(workers=1), set[int](), 0
    running: list[tuple[int, list[int]]] = []
    for what, prompt, which in facts:
        names = names_of(prompt)
        if what == "arrives":
            arrival = world.arrival(prompt)
            world.core.on_arrival(arrival)
            running.append((arrival.request_id, prompt))
        elif what in ("ends", "refused") and running:
            request_id, prompt = running.pop(which % len(running))
            if what == "ends":
                world.events(0, seq, stored(prompt))
                seq += 1
                held.update(names_of(prompt))
            world.core.on_finish(Finish(0.0, request_id, refused=what == "refused"))
        elif what == "stored":
            world.events(0, seq, stored(prompt))
            seq += 1
            held.update(names)
        elif what == "removed":
            gone = removed(prompt, 1 + which % len(prompt))
            world.events(0, seq, gone)
            seq += 1
            held.difference_update(names[-len(gone.hashes) :])
    for request_id, prompt in running:
        world.events(0, seq, stored(prompt))
        seq += 1
        held.update(names_of(prompt))
        world.core.on_finish(Finish(0.0, request_id))
    for prompt in PROMPTS:
        resident = [*(name in held for name in names_of(prompt)), False].index(False)
        assert expected_hit(world, [*prompt, 9], 0) == resident * BLOCK


def test_a_cache_reset_ends_all_expected_blocks() -> None:
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
