"""The prefix tree of steps that follow each other: read anew only where it may have changed.

From one decode step to the next the same requests have the same pages and some a page more, which
is nobody else's. Seeing that costs one comparison of the tables, a tree costs sorting them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkernels.ops.prefix_tree import Ints, PrefixTree, prefix_tree


class KeptTree:
    """Lifetime: worker; has a copy of the last step's table."""

    def __init__(self) -> None:
        self._tree: PrefixTree | None = None
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._full_pages = np.zeros(0, dtype=np.int64)

    def of(self, page_table: NDArray[np.int32], full_pages: Ints) -> PrefixTree:
        """As `prefix_tree`, and the very same object while the tree stays as it is."""
        if self._tree is None or not self._goes_on(page_table, full_pages):
            self._tree = prefix_tree(page_table, full_pages)
            self._table = page_table.copy()
        self._full_pages = full_pages.copy()
        return self._tree

    def _goes_on(self, table: NDArray[np.int32], full_pages: Ints) -> bool:
        """Whether this is a step after the last one that changes nothing in the tree."""
        if len(table) != len(self._full_pages) or not len(table):
            return False
        grown = full_pages - self._full_pages
        wide = min(table.shape[1], self._table.shape[1])
        if grown.min() < 0 or grown.max() > 1 or self._full_pages.max() > wide:
            return False
        differ = np.flatnonzero(table[:, :wide] != self._table[:, :wide])
        rows, columns = differ // max(wide, 1), differ % max(wide, 1)
        if (columns < self._full_pages[rows]).any():
            return False
        rows_grown = np.flatnonzero(grown)
        now_full = self._full_pages[rows_grown]  # columns
        if ((table[:, now_full] == table[rows_grown, now_full]).sum(axis=0) > 1).any():
            return False  # a page that somebody else names at the same place
        if table.shape[1] != self._table.shape[1]:
            self._table = table.copy()
        else:
            self._table[rows, columns] = table[rows, columns]
        return True
