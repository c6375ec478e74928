"""Tests of the worth that requests give their blocks: the order of eviction, how long the worth
lasts, and what is refused.
"""

from __future__ import annotations

import pytest

from engine.block_pool import (
    DEFAULT_PRIORITY,
    DEFAULT_RETENTION,
    MAX_RANGES,
    BlockPool,
    BlockRetention,
    InvalidRetention,
    Removed,
    Retention,
    TokenRange,
)
from tests.engine.chains import chain_of, prompt
from tests.engine.scheduling import SIZE, Driver, array, make, request
from tests.oracles.block_pool import check_pool


def retention_of(*ranges: tuple[int, int | None, int, float | None], **more: float) -> Retention:
    return Retention.of([TokenRange.of(*one) for one in ranges], **more)  # type: ignore[arg-type]


def hold(pool: BlockPool, tokens: list[int], worths: list[BlockRetention] | None) -> list[int]:
    """Hold and publish the blocks of `tokens` with these worths; return the block ids."""
    chain = chain_of(tokens)
    hit = pool.hit(chain)
    ids = pool.acquire(chain, hit, worths and worths[:hit])
    fresh = pool.allocate(len(chain) - hit)
    assert fresh is not None
    rest, parent = array(tokens[hit * SIZE :]), chain[hit - 1] if hit else None
    return ids + pool.publish(fresh, chain[hit:], parent, rest, worths and worths[hit:])


def removed(pool: BlockPool, count: int) -> list[int]:
    """Return the block hashes that are evicted first, in order, if `count` more blocks
    are needed.
    """
    pool.drain_events()
    ids = pool.allocate(count)
    assert ids is not None
    check_pool(pool)
    gone = [one for one in pool.drain_events() if isinstance(one, Removed)]
    pool.release(ids)
    return [block_hash for event in gone for block_hash in event.block_hashes]


def test_the_lowest_priority_is_evicted_first_and_ties_by_age():
    pool = BlockPool(6, SIZE)
    for prefix, worth in ((1, 80), (2, 35), (3, 0), (4, 35), (5, 100), (6, 0)):
        pool.release(hold(pool, prompt(prefix, 1), [BlockRetention(worth)]))
    order = [chain_of(prompt(prefix, 1))[0] for prefix in (3, 6, 2, 4, 1, 5)]
    assert removed(pool, 6) == order


def test_a_parent_is_evicted_after_its_highest_priority_child():
    pool = BlockPool(6, SIZE)
    low_trunk = prompt(1, 2)
    pool.release(
        hold(
            pool,
            low_trunk + prompt(2, 1),
            [BlockRetention(0), BlockRetention(0), BlockRetention(80)],
        )
    )
    pool.release(hold(pool, prompt(9, 3), None))
    trunk, other = chain_of(low_trunk + prompt(2, 1)), chain_of(prompt(9, 3))
    # The child is worth more than the strangers, so its parents of no worth stay as long.
    assert removed(pool, 3) == other[::-1]
    assert removed(pool, 6) == trunk[::-1]


def test_children_of_lower_priority_are_evicted_before_their_trunk():
    pool = BlockPool(6, SIZE)
    trunk = prompt(1, 2)
    pool.release(
        hold(
            pool,
            trunk + prompt(2, 2),
            [BlockRetention(90), BlockRetention(90), DEFAULT_RETENTION, DEFAULT_RETENTION],
        )
    )
    pool.release(hold(pool, prompt(9, 2), None))
    branch, other = chain_of(trunk + prompt(2, 2)), chain_of(prompt(9, 2))
    assert removed(pool, 4) == [branch[3], branch[2], *other[::-1]]
    assert pool.hit(branch) == 2


def test_a_retention_duration_starts_again_with_each_use_of_a_block():
    pool = BlockPool(2, SIZE)
    tokens, other = prompt(1, 1), prompt(2, 1)
    pool.release(hold(pool, tokens, [BlockRetention(80, 10.0)]))
    pool.advance(9.0)
    held = hold(pool, tokens, None)
    pool.advance(100.0)  # it is in use, and its time stands still
    pool.release(held)
    pool.release(hold(pool, other, None))
    pool.advance(109.0)
    assert removed(pool, 1) == chain_of(other)
    pool.release(hold(pool, other, None))
    pool.advance(110.0)
    assert removed(pool, 1) == chain_of(tokens), "worth no more than the younger one by now"


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (80, 10, True),  # no request lowers the worth that another asked for
        (80, None, True),
        (10, 80, True),
        (10, None, False),  # used by a request without a worth: worth as much as others, and older
        (None, 10, False),
        (10, 20, False),
    ],
)
def test_a_shared_block_has_the_highest_requested_priority(
    first: int | None, second: int | None, kept: bool
):
    pool = BlockPool(2, SIZE)
    shared, other = prompt(1, 1), prompt(2, 1)
    for priority in (first, second):
        worths = None if priority is None else [BlockRetention(priority)]
        pool.release(hold(pool, shared, worths))
    pool.release(hold(pool, other, None))
    assert removed(pool, 1) == chain_of(other if kept else shared)


def test_computing_a_block_again_can_raise_its_priority():
    pool = BlockPool(3, SIZE)
    chain, tokens = chain_of(prompt(1, 1)), array(prompt(1, 1))
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.publish(first, chain, None, tokens)
    assert pool.publish(second, chain, None, tokens, [BlockRetention(80)]) == first
    pool.release(first)
    pool.release(first)
    pool.release(hold(pool, prompt(2, 2), None))
    assert removed(pool, 2) == chain_of(prompt(2, 2))[::-1]


def test_the_priority_of_an_evicted_or_cleared_block_is_forgotten():
    pool = BlockPool(2, SIZE)
    pool.release(hold(pool, prompt(1, 1), [BlockRetention(80)]))
    pool.clear()
    pool.release(hold(pool, prompt(1, 1), None))
    pool.release(hold(pool, prompt(2, 1), None))
    assert removed(pool, 1) == chain_of(prompt(1, 1))


def test_old_retention_entries_do_not_pile_up():
    pool = BlockPool(4, SIZE)
    for turn in range(2_000):
        pool.advance(float(turn))
        pool.release(hold(pool, prompt(1, 2), [BlockRetention(80, 1e6), BlockRetention(70, 1e6)]))
    idle = pool._idle
    assert len(idle._leaves) + len(idle._ends) < 300
    check_pool(pool)


def test_a_block_has_the_priority_of_the_range_of_its_first_token():
    retention = retention_of((0, 6, 80, None), (8, 12, 10, 500.0), decode_priority=3)
    prompt_tokens = 4 * SIZE + 1
    assert retention.block_retentions(0, 6, SIZE, prompt_tokens) == [
        BlockRetention(80),
        BlockRetention(80),
        BlockRetention(10, 0.5),
        DEFAULT_RETENTION,
        DEFAULT_RETENTION,  # the prompt begins it, whatever ends it
        BlockRetention(3),
    ]
    assert retention_of((4, None, 60, None)).block_retentions(0, 3, SIZE, 100) == [
        DEFAULT_RETENTION,
        BlockRetention(60),
        BlockRetention(60),
    ]


@pytest.mark.parametrize(
    ("ranges", "more", "told"),
    [
        ([(0, 8, 101, None)], {}, "priority must be 0..100"),
        ([(0, 8, -1, None)], {}, "priority must be 0..100"),
        ([(8, 8, 50, None)], {}, "token_start"),
        ([(-1, 8, 50, None)], {}, "token_start"),
        ([(0, 8, 50, -1.0)], {}, "duration_ms"),
        ([(0, 8, 50, float("nan"))], {}, "duration_ms"),
        ([(0, 8, 50, None), (7, 9, 50, None)], {}, "overlap"),
        ([(0, None, 50, None), (7, 9, 50, None)], {}, "overlap"),
        ([], {"decode_priority": 200}, "decode_retention_priority"),
        ([(i, i + 1, 50, None) for i in range(MAX_RANGES + 1)], {}, "at most 64"),
    ],
)
def test_the_error_names_the_bad_retention_field(
    ranges: list[tuple[int, int | None, int, float | None]], more: dict[str, float], told: str
):
    with pytest.raises(InvalidRetention, match=told):
        retention_of(*ranges, **more)


def test_a_duration_of_the_default_priority_has_no_effect():
    assert retention_of((0, 4, DEFAULT_PRIORITY, 5.0)).block_retentions(0, 1, SIZE, 8) == [
        DEFAULT_RETENTION
    ]


def test_a_retained_trunk_survives_a_flood_of_other_requests():
    def trunk_left(retention: Retention | None) -> int:
        driver = Driver(make(blocks=32))
        driver.scheduler.add(request(0, prompt(1, 8), retention=retention), 0.0)
        driver.run()
        for number in range(1, 9):
            driver.scheduler.add(request(number, prompt(number + 1, 8)), driver.now_s)
            driver.run()
        check_pool(driver.scheduler.pool)
        return driver.scheduler.pool.hit(chain_of(prompt(1, 8)))

    assert trunk_left(None) == 0
    assert trunk_left(retention_of((0, None, 80, None))) == 8
    assert trunk_left(retention_of((0, 4 * SIZE, 80, None))) == 4
    assert trunk_left(retention_of((0, None, 80, 1000.0))) == 8, "not a second passes here"
    assert trunk_left(retention_of((0, None, 80, 0.0))) == 0
