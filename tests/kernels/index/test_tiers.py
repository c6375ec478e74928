"""Tests that the native index and its Python version agree on tiers, dumps and the
smaller methods.
"""

from types import ModuleType

import numpy as np
import pytest

from kvkernels import _native
from tests.oracles import index as twins

BOTH = pytest.mark.parametrize("module", [_native, twins], ids=["native", "twin"])
CHAIN = np.arange(10, 18, dtype=np.uint64)


@BOTH
def test_a_row_counts_its_tier_and_the_tiers_above(module: ModuleType) -> None:
    index = module.PrefixIndex(3)
    assert index.tiers == 1
    index.store(0, CHAIN[:3])
    index.store(0, CHAIN[2:6], 1)
    index.store(1, CHAIN, 2)
    assert index.tiers == 3
    assert index.longest_prefix(CHAIN).tolist() == [3, 0, 0]
    rows = index.longest_prefix_tiers(CHAIN)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[3, 0, 0], [6, 0, 0], [6, 8, 0]]


@BOTH
def test_tiers_remove_blocks_separately_and_are_cleared_together(module: ModuleType) -> None:
    index = module.PrefixIndex(2)
    for tier in range(3):
        assert index.store(0, CHAIN, tier) == 8
    assert len(index) == 24
    assert index.remove(0, CHAIN[:2], 1) == 2
    assert [index.held(0, tier) for tier in range(3)] == [8, 6, 8]
    assert [index.contains(0, CHAIN[:4], tier) for tier in range(3)] == [4, 2, 4]
    assert index.contains(1, CHAIN) == 0
    assert index.clear_worker(0) == 22
    assert (len(index), index.tiers, index.held(0, 2)) == (0, 1, 0)


@BOTH
def test_a_loaded_dump_is_the_same_index(module: ModuleType) -> None:
    index = module.PrefixIndex(70, max_entries=1000, max_bytes=1 << 20)
    for worker in range(70):
        index.store(worker, CHAIN[: 1 + worker % 8], worker % 3)
    data = index.dump()
    for reader in (_native, twins):
        again = reader.PrefixIndex.load(data)
        assert (again.workers, again.max_entries, again.max_bytes) == (70, 1000, 1 << 20)
        assert len(again) == len(index)
        np.testing.assert_array_equal(
            again.longest_prefix_tiers(CHAIN), index.longest_prefix_tiers(CHAIN)
        )
        assert [again.held(w, 1) for w in range(70)] == [index.held(w, 1) for w in range(70)]
