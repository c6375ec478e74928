"""Tests of the index over chosen histories: holes, orders of events, and cases in which Dynamo's
index fails.

In these cases ai-dynamo 1.6.1 answers 1,001 where 2,048 is true, after a block was evicted and
stored again, and drops what is stored below a hole.
"""

import numpy as np
import pytest

from kvkernels import PrefixIndex


def hashes(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


@pytest.mark.parametrize("workers", [1, 8, 64, 65, 256, 1024, 4096])
def test_lookup_returns_the_hit_of_each_nested_prefix(workers: int) -> None:
    """If worker w holds the first w blocks of one chain of 500, the lookup returns w for each
    worker.
    """
    chain = np.arange(500, dtype=np.uint64) << np.uint64(40)
    index = PrefixIndex(workers)
    for worker in range(workers):
        index.store(worker, chain[:worker])
    wanted = np.minimum(np.arange(workers), 500)
    np.testing.assert_array_equal(index.longest_prefix(chain), wanted)


def test_a_gap_that_is_filled_again_restores_the_hit() -> None:
    index = PrefixIndex(2)
    chain = hashes([10, 11, 12, 13])
    index.store(1, chain[2:])  # children before their parents
    assert index.longest_prefix(chain).tolist() == [0, 0]
    index.store(1, chain[:2])
    assert index.longest_prefix(chain).tolist() == [0, 4]
    index.remove(1, chain[1:2])
    assert index.longest_prefix(chain).tolist() == [0, 1]
    index.store(1, chain[1:2])
    assert index.longest_prefix(chain).tolist() == [0, 4]


def test_a_chain_may_repeat_a_hash() -> None:
    index = PrefixIndex(1)
    assert index.store(0, hashes([5, 5, 6])) == 2
    assert index.longest_prefix(hashes([5, 5, 5, 6, 5])).tolist() == [5]
    assert index.remove(0, hashes([5, 5])) == 1
    assert len(index) == 1


@pytest.mark.parametrize(("blocks", "hole"), [(8, 3), (2_048, 1_000)])
@pytest.mark.parametrize("split", [False, True], ids=["alone", "split at every block"])
def test_a_block_stored_again_restores_the_full_chain(blocks: int, hole: int, split: bool) -> None:
    """After a block was evicted and stored again, the whole chain counts as held, because the
    engine still holds the rest, whatever other prompts share.
    """
    chain = np.arange(1, blocks + 1, dtype=np.uint64) << np.uint64(20)
    index = PrefixIndex(2)
    index.store(0, chain)
    if split:
        for depth in range(blocks):
            index.store(1, hashes([int(chain[depth]), 5_000_000_000 + depth]))
    index.remove(0, chain[hole : hole + 1])
    assert index.longest_prefix(chain)[0] == hole
    index.store(0, chain[hole : hole + 1])
    assert index.longest_prefix(chain)[0] == blocks


def test_blocks_stored_after_a_gap_count_once_the_gap_is_filled() -> None:
    chain = np.arange(10, 20, dtype=np.uint64)
    index = PrefixIndex(1)
    index.store(0, chain[:8])
    index.remove(0, chain[3:4])
    index.store(0, chain[8:])  # appended to a tail the engine still holds
    assert index.longest_prefix(chain).tolist() == [3]
    index.store(0, chain[3:4])
    assert index.longest_prefix(chain).tolist() == [10]


def test_the_first_block_stored_again_restores_the_full_chain() -> None:
    chain = np.arange(10, 18, dtype=np.uint64)
    index = PrefixIndex(1)
    index.store(0, chain)
    index.remove(0, chain[:1])
    assert index.longest_prefix(chain).tolist() == [0]
    index.store(0, chain[:1])
    assert index.longest_prefix(chain).tolist() == [8]


def test_children_stored_before_their_parents_are_hit() -> None:
    chain = np.arange(10, 18, dtype=np.uint64)
    index = PrefixIndex(1)
    for depth in reversed(range(8)):
        index.store(0, chain[depth : depth + 1])
    assert index.longest_prefix(chain).tolist() == [8]


def test_removing_an_unknown_block_changes_nothing() -> None:
    index = PrefixIndex(1)
    assert index.remove(0, hashes([1, 2, 3])) == 0
    assert index.remove(0, hashes([1]), 2) == 0
    assert len(index) == 0


def test_a_block_stored_twice_is_gone_after_one_removal() -> None:
    """A block that was stored twice is gone after one removal: the index keeps membership and no
    count, because engines report only the removal of a block's last copy.
    """
    index = PrefixIndex(2)
    index.store(0, hashes([7]))
    assert index.store(0, hashes([7])) == 0
    index.store(1, hashes([7]))
    assert index.remove(0, hashes([7])) == 1
    assert index.longest_prefix(hashes([7])).tolist() == [0, 1]


def test_the_index_stays_right_if_workers_are_cleared_again_and_again() -> None:
    """The index stays right if workers are cleared more often than it has spare slots, with hardly
    a write that would clean up cleared ones.
    """
    index = PrefixIndex(20)
    chain = np.arange(50, dtype=np.uint64)
    for turn in range(30):
        for worker in range(20):
            index.store(worker, chain[: worker + turn])
            index.store(worker, chain[worker:], 2)
        for worker in range(20):
            wanted = min(worker + turn, 50) + 50 - worker
            assert index.clear_worker(worker) == wanted
            assert index.longest_prefix_tiers(chain)[:, worker].tolist() == [0, 0, 0]
    assert (len(index), index.tiers) == (0, 1)
    assert index.store(3, chain) == 50
    assert index.longest_prefix(chain).tolist() == [50 if w == 3 else 0 for w in range(20)]
