"""Hypothesis strategies for paths of blocks, their hashes, and bytes that are not a valid dump or
batch.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

# As in tests of the prefix index: hashes that all belong in the table's first or last places.
CLUSTER = 0xF1DE83E19937733D


def hashes(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def tree_chain(path: list[int]) -> list[int]:
    """Return a chain as prompts make them, in which each block's name depends on its
    whole prefix.
    """
    names, name = [], 1
    for branch in path:
        name = name * 4 + branch
        names.append(name * CLUSTER % 2**64)
    return names


paths = st.lists(st.integers(0, 3), max_size=12).map(tree_chain)
# Not valid chains: repeated blocks, and children without their parents.
garbage = st.lists(st.integers(0, 20).map(lambda n: n * CLUSTER % 2**64), max_size=12)
