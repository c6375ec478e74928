"""The native index and its twin live through the same random histories."""

import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkernels import PrefixIndex, twins
from tests.effort import EFFORT

# Multiples of the inverse of the table's multiplier all want the first or, counted down, the
# last slots: clusters, which deletion must shift back, across the table's end as well.
CLUSTER = 0xF1DE83E19937733D
BLOCKS = [0, 1, 2**32, 2**63, 2**64 - 1]
BLOCKS += [i * CLUSTER % 2**64 for i in range(1, 40)] + [-i * CLUSTER % 2**64 for i in range(1, 20)]

chains = st.lists(st.sampled_from(BLOCKS), max_size=24)
worker_counts = st.sampled_from([1, 2, 3, 63, 64, 65, 130])


def hashes(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def holders(index: PrefixIndex, block: int) -> set[int]:
    return set(np.flatnonzero(index.longest_prefix(hashes([block]))).tolist())


class SameHistory(RuleBasedStateMachine):
    """Below the bound: every answer of the native index is the twin's."""

    @initialize(workers=worker_counts)
    def start(self, workers: int) -> None:
        self.workers = workers
        self.native = PrefixIndex(workers, max_entries=len(BLOCKS))
        self.twin = twins.PrefixIndex(workers, max_entries=len(BLOCKS))

    @rule(worker=st.integers(0, 999), chain=chains)
    def store(self, worker: int, chain: list[int]) -> None:
        worker %= self.workers
        fresh = self.native.store(worker, hashes(chain))
        assert fresh == self.twin.store(worker, hashes(chain))

    @rule(worker=st.integers(0, 999), chain=chains)
    def remove(self, worker: int, chain: list[int]) -> None:
        worker %= self.workers
        gone = self.native.remove(worker, hashes(chain))
        assert gone == self.twin.remove(worker, hashes(chain))

    @rule(worker=st.integers(0, 999))
    def clear_worker(self, worker: int) -> None:
        worker %= self.workers
        assert self.native.clear_worker(worker) == self.twin.clear_worker(worker)

    @rule(chain=chains)
    def longest_prefix(self, chain: list[int]) -> None:
        got = self.native.longest_prefix(hashes(chain))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, self.twin.longest_prefix(hashes(chain)))

    @precondition(lambda self: hasattr(self, "native"))
    @invariant()
    def same_state(self) -> None:
        assert len(self.native) == len(self.twin)
        assert self.native.evicted == 0
        for block in BLOCKS:
            assert holders(self.native, block) == holders(self.twin, block), block


class AtTheBound(RuleBasedStateMachine):
    """At the bound: it may forget, but never claims a block that is not held, nor grows."""

    @initialize(workers=worker_counts, max_entries=st.integers(1, 20))
    def start(self, workers: int, max_entries: int) -> None:
        self.native = PrefixIndex(workers, max_entries=max_entries)
        self.held: dict[int, set[int]] = defaultdict(set)  # worker -> blocks stored, not removed

    @rule(worker=st.integers(0, 999), chain=chains)
    def store(self, worker: int, chain: list[int]) -> None:
        worker %= self.native.workers
        self.native.store(worker, hashes(chain))
        self.held[worker].update(chain)

    @rule(worker=st.integers(0, 999), chain=chains)
    def remove(self, worker: int, chain: list[int]) -> None:
        worker %= self.native.workers
        gone = self.native.remove(worker, hashes(chain))
        assert gone <= len(self.held[worker] & set(chain))
        self.held[worker].difference_update(chain)

    @rule(worker=st.integers(0, 999))
    def clear_worker(self, worker: int) -> None:
        worker %= self.native.workers
        known = sum(worker in holders(self.native, block) for block in BLOCKS)
        assert self.native.clear_worker(worker) == known
        self.held[worker].clear()

    @precondition(lambda self: hasattr(self, "native"))
    @invariant()
    def never_more_than_was_stored(self) -> None:
        assert len(self.native) <= self.native.max_entries
        known = 0
        for block in BLOCKS:
            claimed = holders(self.native, block)
            known += bool(claimed)
            assert all(block in self.held[worker] for worker in claimed), block
        assert len(self.native) == known


SameHistory.TestCase.settings = settings(
    max_examples=60 * EFFORT, stateful_step_count=30, deadline=None
)
AtTheBound.TestCase.settings = settings(
    max_examples=60 * EFFORT, stateful_step_count=30, deadline=None
)
TestSameHistory = SameHistory.TestCase
TestAtTheBound = AtTheBound.TestCase


@pytest.mark.parametrize("workers", [1, 8, 64, 65, 256, 1024, 4096])
def test_hits_of_nested_prefixes(workers: int) -> None:
    """Worker w holds the first w blocks of one chain of 500."""
    chain = np.arange(500, dtype=np.uint64) << np.uint64(40)
    index = PrefixIndex(workers)
    for worker in range(workers):
        index.store(worker, chain[:worker])
    wanted = np.minimum(np.arange(workers), 500)
    np.testing.assert_array_equal(index.longest_prefix(chain), wanted)


def test_a_hole_that_is_filled_again() -> None:
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


def test_a_block_in_use_outlives_the_bound() -> None:
    """Whatever is looked up between any two evictions stays: the clock gives a second chance."""
    index = PrefixIndex(1, max_entries=1000)
    trunk = np.arange(50, dtype=np.uint64)
    index.store(0, trunk)
    for start in range(1000, 21_000, 100):
        index.store(0, np.arange(start, start + 100, dtype=np.uint64))
        assert index.longest_prefix(trunk).tolist() == [50], start
    assert len(index) == 1000
    assert index.evicted == 20_000 + 50 - 1000


def test_memory_grows_with_use_and_stays_bounded() -> None:
    blocks = np.random.default_rng(3).integers(0, 2**63, 200_000).astype(np.uint64)
    index = PrefixIndex(64, max_entries=100_000)
    assert index.memory_bytes < 4096
    index.store(0, blocks[:1000])
    assert index.memory_bytes < 40 * 1000 + 4096
    index.store(0, blocks)
    assert index.memory_bytes < 24 * 100_000 + 4096
    assert PrefixIndex(4096).memory_bytes < 80_000


def test_deletion_leaves_nothing_behind() -> None:
    """Churn at constant size: the table neither grows nor loses a block."""
    index = PrefixIndex(1)
    window = np.arange(1000, dtype=np.uint64)
    index.store(0, window)
    before = index.memory_bytes
    for step in range(1, 200):
        index.remove(0, window[:500] + np.uint64((step - 1) * 500))
        index.store(0, window[500:] + np.uint64(step * 500))
        assert len(index) == 1000
    assert index.longest_prefix(window + np.uint64(199 * 500)).tolist() == [1000]
    assert index.memory_bytes <= 1.5 * before


def test_threads_share_one_index() -> None:
    index = PrefixIndex(8, max_entries=1 << 16)
    rng = np.random.default_rng(11)
    chains_of = [rng.integers(0, 2**63, 2000).astype(np.uint64) for _ in range(8)]
    errors: list[str] = []

    def live(worker: int) -> None:
        chain = chains_of[worker]
        for cut in range(0, 2000, 50):
            index.store(worker, chain)
            if index.longest_prefix(chain)[worker] != 2000:
                errors.append(f"worker {worker} lost its own chain")
            index.remove(worker, chain[cut:])
            if index.longest_prefix(chain)[worker] != cut:
                errors.append(f"worker {worker} holds more than {cut} blocks")

    threads = [threading.Thread(target=live, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(index) == 8 * 1950
