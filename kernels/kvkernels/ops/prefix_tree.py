"""Which requests of a step name the same pages: a tree read off their page tables.

Prefix caching has made equal prefixes equal page ids, so that comparing integers is enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LEVELS = 8  # of the tree: what is nested deeper is not looked at


class PrefixTree(NamedTuple):
    """Runs of pages that at least two requests have in common, parents before children.

    Node v stands for the requests order[first[v] : end[v]], whose tables agree on the first
    pages[v] pages, and on no more. Its parent's requests are a superset; -1: no parent.
    """

    order: Ints  # [requests]
    first: Ints  # [nodes], as all below
    end: Ints
    pages: Ints
    parent: Ints
    depth: Ints  # 1 .. LEVELS

    def ancestors_pages(self) -> Ints:
        """int64[nodes, LEVELS + 1]: pages of the ancestor at each depth, the node's own at its
        depth; 0 at depth 0, and beyond the node's depth."""
        found = np.zeros((len(self.first), LEVELS + 1), dtype=np.int64)
        for depth in range(1, int(self.depth.max(initial=0)) + 1):
            own = np.flatnonzero(self.depth == depth)
            if depth > 1:
                found[own] = found[self.parent[own]]
            found[own, depth] = self.pages[own]
        return found


def prefix_tree(page_table: NDArray[np.int32], full_pages: Ints) -> PrefixTree:
    """The tree of `page_table` [requests, pages], of whose row r the first full_pages[r] count."""
    alone = -1 - np.arange(len(full_pages))
    heads = np.where(full_pages > 0, page_table[:, 0], alone) if page_table.size else alone
    by_head = heads.argsort(kind="stable")
    same = heads[by_head[1:]] == heads[by_head[:-1]]
    is_candidate = np.zeros(len(heads), dtype=bool)
    is_candidate[:-1] = same
    is_candidate[1:] |= same
    candidates, others = by_head[is_candidate], by_head[~is_candidate]
    if not len(candidates):
        return PrefixTree(others, *np.zeros((5, 0), dtype=np.int64))
    order, common = _sorted_rows(page_table, full_pages, candidates)
    nodes = _nodes(common.tolist())
    return PrefixTree(
        np.concatenate((order, others)), *np.array(nodes, dtype=np.int64).reshape(-1, 5).T
    )


def _sorted_rows(page_table: NDArray[np.int32], full_pages: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """`rows` with equal prefixes side by side, and how many pages each shares with the next."""
    full = full_pages[rows]
    wide = int(full.max()) + 1
    table = np.empty((len(rows), wide + wide % 2), dtype=np.int32)
    known = min(wide, page_table.shape[1])
    table[:, :known] = page_table[rows, :known]
    table[np.arange(len(rows)), full] = -1 - rows  # nobody else's: prefixes end here at last
    kind: Any = np.dtype((np.void, table.shape[1] * table.itemsize))
    by_bytes = table.view(kind)[:, 0].argsort()
    table = table[by_bytes]
    differ = table[1:].view(np.int64) != table[:-1].view(np.int64)
    pair = differ.argmax(axis=1)
    at = np.arange(len(pair))
    common = 2 * pair + (table[at, 2 * pair] == table[at + 1, 2 * pair])
    return rows[by_bytes], common


def _nodes(common: list[int]) -> list[tuple[int, int, int, int, int]]:
    """(first, end, pages, parent, depth) of each run of rows with a longer common prefix than the
    rows about it; parents before children."""
    closed: list[tuple[int, int, int]] = []  # (pages, first, end), children before parents
    open_runs = [(0, 0)]  # (pages, first), longer prefixes later
    for end, pages in enumerate([*common, 0], start=1):
        first = end - 1
        while open_runs[-1][0] > pages:
            longer, first = open_runs.pop()
            closed.append((longer, first, end))
        if open_runs[-1][0] < pages:
            open_runs.append((pages, first))
    nodes: list[tuple[int, int, int, int, int]] = []
    line: list[int] = []  # the node and its ancestors
    for pages, first, end in sorted(closed, key=lambda run: (run[1], -run[2])):
        while line and nodes[line[-1]][1] <= first:
            line.pop()
        if len(line) < LEVELS:
            parent = line[-1] if line else -1
            line.append(len(nodes))
            nodes.append((first, end, pages, parent, len(line)))
    return nodes
