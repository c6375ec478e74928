"""Tests that the native prefix index and its Python version agree over random histories."""

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

from kvkernels import PrefixIndex
from tests.effort import examples
from tests.oracles import index as twins

# All multiples of the inverse of the table's multiplier belong in the first slots or, counted down,
# in the last ones. Deletion must shift these clusters back, also across the table's end.
CLUSTER = 0xF1DE83E19937733D
BLOCKS = [0, 1, 2**32, 2**63, 2**64 - 1]
BLOCKS += [i * CLUSTER % 2**64 for i in range(1, 40)] + [-i * CLUSTER % 2**64 for i in range(1, 20)]

chains = st.lists(st.sampled_from(BLOCKS), max_size=24)
worker_counts = st.sampled_from([1, 2, 3, 63, 64, 65, 130, 700])
tiers = st.sampled_from([0, 0, 0, 1, 2])


def hashes(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def holders(index: PrefixIndex, block: int) -> set[tuple[int, int]]:
    """Return the set of (t, worker) for which the worker holds the block in one of the tiers 0 to
    t.
    """
    workers, one = range(index.workers), hashes([block])
    return {(t, w) for t in range(3) for w in workers if index.contains(w, one, t)}


class NativeAndPythonMachine(RuleBasedStateMachine):
    """Checks that every answer of the native index equals the Python version's while the index is
    not full.
    """

    @initialize(workers=worker_counts)
    def start(self, workers: int) -> None:
        self.native = PrefixIndex(workers, max_entries=3 * len(BLOCKS))
        self.twin = twins.PrefixIndex(workers, max_entries=3 * len(BLOCKS))

    def worker(self, number: int) -> int:
        return number % self.native.workers

    @rule(worker=st.integers(0, 999), chain=chains, tier=tiers)
    def store(self, worker: int, chain: list[int], tier: int) -> None:
        worker = self.worker(worker)
        fresh = self.native.store(worker, hashes(chain), tier)
        assert fresh == self.twin.store(worker, hashes(chain), tier)

    @rule(
        first=st.integers(0, 999), count=st.integers(2, 90), step=st.integers(1, 60), chain=chains
    )
    def store_shared(self, first: int, count: int, step: int, chain: list[int]) -> None:
        """Store the chain at many workers at once, whose numbers are close together or far apart,
        which makes the wider forms of a set of workers.
        """
        for i in range(min(count, self.native.workers)):
            self.store(first + i * step, chain, 0)

    @rule(worker=st.integers(0, 999), chain=chains, tier=tiers)
    def remove(self, worker: int, chain: list[int], tier: int) -> None:
        worker = self.worker(worker)
        gone = self.native.remove(worker, hashes(chain), tier)
        assert gone == self.twin.remove(worker, hashes(chain), tier)

    @rule(worker=st.integers(0, 999), again=st.integers(1, 3), chain=chains)
    def clear_worker(self, worker: int, again: int, chain: list[int]) -> None:
        """Clear a worker's slot and use it again, perhaps before the index has removed the old
        entries.
        """
        worker = self.worker(worker)
        for _ in range(again):
            assert self.native.clear_worker(worker) == self.twin.clear_worker(worker)
            self.store(worker, chain, 0)
        assert self.native.clear_worker(worker) == self.twin.clear_worker(worker)

    @rule(chain=chains)
    def longest_prefix(self, chain: list[int]) -> None:
        got = self.native.longest_prefix(hashes(chain))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, self.twin.longest_prefix(hashes(chain)))
        raised = np.resize(np.array([0, 3, 9], dtype=np.int32), len(got))
        wanted = np.maximum(raised, got)
        self.native.raise_prefix(hashes(chain), raised)
        np.testing.assert_array_equal(raised, wanted)
        self.twin.raise_prefix(hashes(chain), raised)
        np.testing.assert_array_equal(raised, wanted)
        rows = self.native.longest_prefix_tiers(hashes(chain))
        np.testing.assert_array_equal(rows, self.twin.longest_prefix_tiers(hashes(chain)))

    @rule()
    def restart(self) -> None:
        self.native = PrefixIndex.load(self.native.dump())

    @precondition(lambda self: hasattr(self, "native"))
    @invariant()
    def same_state(self) -> None:
        assert len(self.native) == len(self.twin)
        assert self.native.tiers == self.twin.tiers
        assert self.native.evicted == 0
        for worker in {0, 1 % self.native.workers, self.native.workers - 1}:
            assert [self.native.held(worker, t) for t in range(3)] == [
                self.twin.held(worker, t) for t in range(3)
            ]
        for block in BLOCKS:
            one = hashes([block])
            np.testing.assert_array_equal(
                self.native.longest_prefix_tiers(one), self.twin.longest_prefix_tiers(one)
            )


class FullIndexMachine(RuleBasedStateMachine):
    """Checks a full index: it may forget blocks, but never claims one that is not held, and never
    grows.
    """

    @initialize(workers=st.sampled_from([1, 2, 3, 9]), max_entries=st.integers(1, 20))
    def start(self, workers: int, max_entries: int) -> None:
        self.native = PrefixIndex(workers, max_entries=max_entries)
        # (tier, worker) -> blocks stored, not removed
        self.held: dict[tuple[int, int], set[int]] = defaultdict(set)

    @rule(worker=st.integers(0, 999), chain=chains, tier=tiers)
    def store(self, worker: int, chain: list[int], tier: int) -> None:
        worker %= self.native.workers
        self.native.store(worker, hashes(chain), tier)
        self.held[tier, worker].update(chain)

    @rule(worker=st.integers(0, 999), chain=chains, tier=tiers)
    def remove(self, worker: int, chain: list[int], tier: int) -> None:
        worker %= self.native.workers
        gone = self.native.remove(worker, hashes(chain), tier)
        assert gone <= len(self.held[tier, worker] & set(chain))
        self.held[tier, worker].difference_update(chain)

    @rule(worker=st.integers(0, 999))
    def clear_worker(self, worker: int) -> None:
        worker %= self.native.workers
        known = sum(self.native.held(worker, tier) for tier in range(3))
        assert self.native.clear_worker(worker) == known
        for tier in range(3):
            self.held[tier, worker].clear()

    @precondition(lambda self: hasattr(self, "native"))
    @invariant()
    def never_more_than_was_stored(self) -> None:
        assert len(self.native) <= self.native.max_entries
        known: set[tuple[int, int]] = set()  # (tier, block)
        held = 0
        for block in BLOCKS:
            claimed = holders(self.native, block)
            held += len(claimed)
            known |= {(tier, block) for tier, _ in claimed}
            assert all(block in self.held[place] for place in claimed), block
        assert len(self.native) == len(known)
        workers = range(self.native.workers)
        assert held == sum(self.native.held(w, t) for w in workers for t in range(3))


NativeAndPythonMachine.TestCase.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)
FullIndexMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None
)
TestNativeAndPythonMachine = NativeAndPythonMachine.TestCase
TestFullIndexMachine = FullIndexMachine.TestCase


@pytest.mark.parametrize("operations", [100_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_random_operations_equal_a_table_of_bits(operations: int) -> None:
    """Random operations agree with a numpy table of one bit for each (worker, block); there is no
    eviction, and all blocks are in tier 0.
    """
    rng = np.random.default_rng(operations)
    workers, blocks = 96, rng.integers(0, 2**63, 600).astype(np.uint64)
    index = PrefixIndex(workers, max_entries=len(blocks))
    held = np.zeros((workers, len(blocks)), dtype=bool)
    kinds, sizes = rng.integers(0, 100, operations), rng.integers(1, 40, operations)
    starts, slots = rng.integers(0, 560, operations), rng.integers(0, workers, operations)
    for kind, start, size, worker in zip(
        kinds.tolist(), starts.tolist(), sizes.tolist(), slots.tolist(), strict=True
    ):
        chain, of = blocks[start : start + size], held[worker, start : start + size]
        if kind < 40:
            assert index.store(worker, chain) == len(of) - np.count_nonzero(of)
            of[:] = True
        elif kind < 70:
            assert index.remove(worker, chain) == np.count_nonzero(of)
            of[:] = False
        elif kind < 72:
            assert index.clear_worker(worker) == np.count_nonzero(held[worker])
            held[worker] = False
        else:
            depths = np.logical_and.accumulate(held[:, start : start + size], axis=1).sum(axis=1)
            assert (index.longest_prefix(chain) == depths).all()
    assert len(index) == np.count_nonzero(held.any(axis=0))
