"""Tests of the pool of KV blocks: hits, sharing, eviction order, events, accounting."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_pool import BlockPool, Cleared, Removed, Stored
from kvkernels import chain_hashes
from tests.engine.chains import SIZE, chain_of, prompt
from tests.oracles.block_pool import check_pool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Hold and publish all full blocks of `tokens`; return the block ids."""
    chain = chain_of(tokens)
    hit = pool.hit(chain)
    ids = pool.acquire(chain, hit)
    fresh = pool.allocate(len(chain) - hit)
    assert fresh is not None
    rest = np.array(tokens[hit * SIZE : len(chain) * SIZE], dtype=np.int32)
    return ids + pool.publish(fresh, chain[hit:], chain[hit - 1] if hit else None, rest)


def test_a_released_prompt_is_hit_up_to_the_common_prefix():
    pool = BlockPool(16, SIZE)
    pool.release(fill(pool, prompt(7, 3)))
    assert pool.used_blocks == 0
    assert pool.cached_blocks == 3
    assert pool.hit(chain_of(prompt(7, 3))) == 3
    assert pool.hit(chain_of(prompt(7, 3)), limit=2) == 2
    assert pool.hit(chain_of(prompt(7, 2) + prompt(8, 5))) == 2
    assert pool.hit(chain_of(prompt(8, 2))) == 0
    assert pool.hit([]) == 0


def test_private_blocks_are_not_hit():
    pool = BlockPool(4, SIZE)
    assert pool.allocate(2) is not None
    assert pool.hit(chain_of(prompt(1, 2))) == 0
    assert pool.drain_events() == []


def test_allocate_returns_all_blocks_or_none():
    pool = BlockPool(4, SIZE)
    assert pool.allocate(5) is None
    assert pool.allocate(0) == []
    ids = pool.allocate(4)
    assert ids is not None
    assert sorted(ids) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    check_pool(pool)


def test_room_beyond_a_hit_counts_idle_blocks_of_the_hit_once():
    pool = BlockPool(8, SIZE)
    pool.release(fill(pool, prompt(1, 4)))
    held = fill(pool, prompt(1, 2))
    # 4 free + 2 idle, and the hit of 4 blocks would hold those 2 idle ones.
    assert pool.available_blocks == 6
    assert pool.available_beyond(chain_of(prompt(1, 4)), 4) == 4
    assert pool.available_beyond(chain_of(prompt(1, 4)), 2) == 6
    pool.release(held)


def test_eviction_takes_the_oldest_leaf_and_children_before_parents():
    pool = BlockPool(6, SIZE)
    trunk = prompt(1, 2)
    pool.release(fill(pool, trunk + prompt(2, 2)))  # older branch
    pool.release(fill(pool, trunk + prompt(3, 2)))  # younger branch, keeps the trunk young
    pool.drain_events()
    old, young = chain_of(trunk + prompt(2, 2)), chain_of(trunk + prompt(3, 2))
    assert pool.allocate(1) is not None
    assert pool.allocate(4) is not None
    removed = [event.block_hashes for event in pool.drain_events() if isinstance(event, Removed)]
    assert removed == [[old[3]], [old[2], young[3], young[2], young[1]]]
    assert pool.hit(young) == 1
    check_pool(pool)


def test_held_blocks_are_never_evicted():
    pool = BlockPool(4, SIZE)
    held = fill(pool, prompt(1, 2))
    pool.release(fill(pool, prompt(2, 2)))
    assert pool.allocate(2) is not None
    assert pool.allocate(1) is None
    assert pool.hit(chain_of(prompt(1, 2))) == 2
    pool.release(held)


def test_a_duplicate_is_freed_and_its_holder_shares_the_published_block():
    pool = BlockPool(8, SIZE)
    chain = chain_of(prompt(1, 2))
    tokens = np.array(prompt(1, 2), dtype=np.int32)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    assert pool.publish(first, chain, None, tokens) == first
    assert pool.publish(second, chain, None, tokens) == first
    assert pool.used_blocks == 2
    assert len(pool.drain_events()) == 1
    pool.release(first)
    assert pool.used_blocks == 2, "the second holder still holds them"
    pool.release(first)
    assert pool.used_blocks == 0
    check_pool(pool)


def test_stored_events_have_the_parent_and_tokens_of_a_run():
    pool = BlockPool(8, SIZE)
    pool.release(fill(pool, prompt(1, 2)))
    pool.release(fill(pool, prompt(1, 2) + prompt(5, 1)))
    chain = chain_of(prompt(1, 2) + prompt(5, 1))
    first, second = pool.drain_events()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.block_hashes, first.parent_hash) == (chain[:2], None)
    assert first.tokens.tolist() == prompt(1, 2)
    assert (second.block_hashes, second.parent_hash) == (chain[2:], chain[1])
    assert second.tokens.tolist() == prompt(5, 1)
    assert pool.drain_events() == []


def test_a_duplicate_in_the_middle_splits_the_stored_event():
    # Two prompts race; the other one shows block 1 only after this one showed block 0.
    pool = BlockPool(16, SIZE)
    tokens = prompt(1, 1) + prompt(2, 1) + prompt(3, 1)
    chain = chain_of(tokens)
    array = np.array(tokens, dtype=np.int32)
    racer = pool.allocate(2)
    mine = pool.allocate(3)
    assert racer is not None
    assert mine is not None
    racer = pool.publish(racer, chain[:2], None, array[: 2 * SIZE])
    held = pool.publish(mine, chain, None, array)
    assert held[:2] == racer
    assert held[2] == mine[2]
    last = pool.drain_events()[-1]
    assert isinstance(last, Stored)
    assert (last.block_hashes, last.parent_hash) == (chain[2:], chain[1])
    check_pool(pool)


def test_clear_drops_all_blocks_and_held_blocks_stay_private():
    pool = BlockPool(8, SIZE)
    held = fill(pool, prompt(1, 2))
    pool.release(fill(pool, prompt(2, 2)))
    pool.drain_events()
    pool.clear()
    assert pool.drain_events() == [Cleared()]
    assert pool.cached_blocks == 0
    assert pool.used_blocks == 2
    assert pool.snapshot() == []
    pool.release(held)
    assert pool.available_blocks == 8
    check_pool(pool)


def test_a_snapshot_lists_all_blocks_parents_first():
    pool = BlockPool(16, SIZE)
    trunk = prompt(1, 2)
    for tokens in (trunk + prompt(2, 1), trunk + prompt(3, 2), prompt(9, 1)):
        pool.release(fill(pool, tokens))
    known: set[int] = set()
    for event in pool.snapshot():
        assert event.parent_hash is None or event.parent_hash in known
        parent = 0 if event.parent_hash is None else event.parent_hash
        assert event.block_hashes == chain_hashes(event.tokens, SIZE, parent).tolist()
        known.update(event.block_hashes)
    assert len(known) == pool.cached_blocks == 6


def test_misuse_raises_an_error():
    pool = BlockPool(4, SIZE)
    tokens = np.array(prompt(1, 1), dtype=np.int32)
    ids = pool.allocate(1)
    assert ids is not None
    with pytest.raises(ValueError, match="not visible"):
        pool.publish(ids, [1], 99, tokens)
    pool.publish(ids, [1], None, tokens)
    with pytest.raises(ValueError, match="not private"):
        pool.publish(ids, [2], None, tokens)
    pool.release(ids)
    with pytest.raises(ValueError, match="more often"):
        pool.release(ids)
    with pytest.raises(KeyError):
        pool.acquire([77], 1)
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError):
            BlockPool(blocks, size)
    with pytest.raises(ValueError, match="record_events"):
        BlockPool(4, SIZE, record_events=False).snapshot()


def churn(pool: BlockPool) -> None:
    """Store new blocks often enough to exceed the pool's limit of changes that nobody has read."""
    for turn in range(4 * pool.blocks + 1025):
        pool.release(fill(pool, prompt(turn, 1)))


def test_undrained_events_are_an_error_and_not_a_leak():
    with pytest.raises(RuntimeError, match="drain_events"):
        churn(BlockPool(2, SIZE))
    silent = BlockPool(2, SIZE, record_events=False)
    churn(silent)
    assert silent.drain_events() == []
