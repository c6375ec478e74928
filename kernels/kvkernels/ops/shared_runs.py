"""Finds the requests of a step that read the same pages, and chooses the runs of pages to share.

The prefix tree is read from the page tables: prefix caching has turned equal prefixes into equal
page ids, so comparing integers is enough; the tree is read again only if it may have changed. A run
is a range of tokens [begin, end) of requests that are adjacent in the tree's order; dynamic
programming over the tree's nodes chooses the runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkernels.ops.shared_costs import AttentionShape, Costs, run_cost

Ints = NDArray[np.int64]
LEVELS = 8  # of the tree: what is nested deeper is not looked at
LEAST_CHUNK, LARGEST_CHUNK, CHUNK_STEP, CHUNKS = 256, 1024, 64, 8


class PrefixTree(NamedTuple):
    """The tree of the pages that at least two requests have in common, with parents before
    children.

    Node v stands for the requests order[first[v] : end[v]], whose tables agree on the first
    pages[v] pages, and on no more. The requests of its parent include these; a parent of -1 means
    that it has none.
    """

    order: Ints  # [requests]
    first: Ints  # [nodes], as all below
    end: Ints
    pages: Ints
    parent: Ints
    depth: Ints  # 1 .. LEVELS

    def ancestors_pages(self) -> Ints:
        """Return int64[nodes, LEVELS + 1]: the number of pages of a node's ancestor at each depth,
        and of the node itself at its own depth; 0 at depth 0, and beyond the node's depth.
        """
        found = np.zeros((len(self.first), LEVELS + 1), dtype=np.int64)
        for depth in range(1, int(self.depth.max(initial=0)) + 1):
            own = np.flatnonzero(self.depth == depth)
            if depth > 1:
                found[own] = found[self.parent[own]]
            found[own, depth] = self.pages[own]
        return found


def prefix_tree(page_table: NDArray[np.int32], full_pages: Ints) -> PrefixTree:
    """Return the prefix tree of `page_table` [requests, pages], of which only the first
    full_pages[r] entries of row r count.
    """
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
    """Return `rows` in an order in which equal prefixes are adjacent, and how many pages each row
    shares with the next.
    """
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
    """Return (first, end, pages, parent, depth) of each run of rows with a longer common prefix
    than the rows before and after it; parents come before children.
    """
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


class KeptTree:
    """Keeps the prefix tree from step to step. Lifetime: worker; it has a copy of the last step's
    table.
    """

    def __init__(self) -> None:
        self._tree: PrefixTree | None = None
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._full_pages = np.zeros(0, dtype=np.int64)

    def of(self, page_table: NDArray[np.int32], full_pages: Ints) -> PrefixTree:
        """Return the prefix tree, as `prefix_tree` does; it is the same object as long as the tree
        stays the same.
        """
        if self._tree is None or not self._is_unchanged(page_table, full_pages):
            self._tree = prefix_tree(page_table, full_pages)
            self._table = page_table.copy()
        self._full_pages = full_pages.copy()
        return self._tree

    def _is_unchanged(self, table: NDArray[np.int32], full_pages: Ints) -> bool:
        """Return whether the tree of the last step is also the tree of this step."""
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


Floats = NDArray[np.float64]


class Runs(NamedTuple):
    """The chosen runs as arrays int64[runs]. The runs of one request cover each of its
    tokens once.
    """

    begin: Ints
    end: Ints
    first: Ints  # of the tree's order
    requests: Ints


def pieces_of(tokens: Ints) -> Ints:
    """Return the number of items of work in which a run of `tokens` is computed."""
    cut: Ints = -(-tokens // chunks_of(tokens))
    return cut


def chunks_of(tokens: Ints) -> Ints:
    """Return the number of tokens in each item of a run of `tokens`, a multiple of 64.

    It is an eighth of the run, within [256, 1024]: shorter items cost more in partial results than
    they gain in parallelism, longer ones leave a run on too few SMs.
    """
    eighth: Ints = -(-tokens // (CHUNKS * CHUNK_STEP)) * CHUNK_STEP
    return np.clip(eighth, LEAST_CHUNK, LARGEST_CHUNK)


def unchanged_until(tokens: Ints) -> Ints:
    """Return up to how many tokens a run that now has `tokens` keeps the same number of pieces of
    the same length. That number of tokens fills the pieces, because a piece grows only if there
    would be more than CHUNKS pieces.
    """
    filled: Ints = pieces_of(tokens) * chunks_of(tokens)
    return filled


def slots_of(begin: Ints, requests: Ints, pieces: Ints) -> Ints:
    """Return the number of partial results of each request; 0 for a request that is computed in one
    piece, because that needs no merge.
    """
    return np.where((begin == 0) & (pieces <= 1) & (requests == 1), 0, pieces)


class Chooser:
    """Chooses which runs of pages the requests of one step share. `context_tokens` are in the
    tree's order.
    """

    def __init__(
        self,
        tree: PrefixTree,
        context_tokens: Ints,
        page_tokens: int,
        shape: AttentionShape,
        costs: Costs,
    ) -> None:
        self.tree, self.context = tree, context_tokens
        self.shape, self.costs = shape, costs
        self.nodes = len(tree.first)
        # Row -1 is no node: it represents runs that begin at token 0.
        self.ends = np.vstack(
            (tree.ancestors_pages() * page_tokens, np.zeros((1, LEVELS + 1), dtype=np.int64))
        )
        self.leaf = np.full(len(context_tokens), -1)
        for node in range(self.nodes):  # children overwrite their parents
            self.leaf[tree.first[node] : tree.end[node]] = node
        self.depth = np.append(tree.depth, 0)
        self.deepest = int(self.depth.max())

    def cost(self, begin: Ints, end: Ints, requests: Ints) -> Floats:
        pieces = pieces_of(end - begin)
        slots = slots_of(begin, requests, pieces)
        return run_cost(self.costs, self.shape, end - begin, requests, pieces, slots)

    def _alone(self, levels: int) -> Floats:
        """Return the costs [requests, levels] of the tokens that each request reads alone, from the
        end of each ancestor to the end of its last node, in the pieces of all that it reads.
        """
        begin, last = self.ends[self.leaf, :levels], self.ends[self.leaf, self.depth[self.leaf]]
        one, pieces = np.ones(1, dtype=np.int64), pieces_of(self.context[:, None] - begin)
        slots = slots_of(begin, one, pieces)
        return run_cost(self.costs, self.shape, last[:, None] - begin, one, pieces, slots)

    def unchanged_until(self) -> Ints:
        """Return, for each request, the number of context tokens up to which the choice stays the
        same if contexts grow.
        """
        begin = self.ends[self.leaf, : self.deepest + 1]
        until = begin + unchanged_until(self.context[:, None] - begin)
        is_own = np.arange(self.deepest + 1) <= self.depth[self.leaf][:, None]
        least: Ints = np.where(is_own, until, np.iinfo(np.int64).max).min(axis=1)
        return least

    def choose(self) -> Runs:
        """Return the cheapest runs; the runs of every request are in the order of their tokens."""
        levels = self.deepest + 1
        # below[v, k]: the cheapest for all below node v, if what follows ancestor k's end is open.
        below = np.zeros((self.nodes + 1, levels))
        np.add.at(below, self.leaf, self._alone(levels))
        closes = np.zeros((self.nodes, levels), dtype=bool)
        for depth in range(self.deepest, 0, -1):
            own = np.flatnonzero(self.tree.depth == depth)
            begin, end = self.ends[own, :depth], self.ends[own, depth][:, None]
            requests = (self.tree.end[own] - self.tree.first[own])[:, None]
            closed = self.cost(begin, end, requests) + below[own, depth][:, None]
            closes[own, :depth] = closed < below[own, :depth]
            best = np.minimum(closed, below[own, :depth])
            np.add.at(below, (self.tree.parent[own][:, None], np.arange(depth)), best)
        return self._follow(closes)

    def _follow(self, closes: NDArray[np.bool_]) -> Runs:
        """Return the runs that follow from the choice at each node, from the roots of the
        tree on.
        """
        open_at = np.zeros(self.nodes + 1, dtype=np.int64)  # depth from whose end on it is open
        is_shared = np.zeros(self.nodes, dtype=bool)
        begin = np.zeros(self.nodes, dtype=np.int64)
        for depth in range(1, self.deepest + 1):
            own = np.flatnonzero(self.tree.depth == depth)
            given = open_at[self.tree.parent[own]]
            is_shared[own] = closes[own, given]
            begin[own] = self.ends[own, given]
            open_at[own] = np.where(is_shared[own], depth, given)
        shared = np.flatnonzero(is_shared)
        rests = self.ends[self.leaf, open_at[self.leaf]]
        alone = np.flatnonzero((rests < self.context) | (self.context == 0))
        return Runs(
            np.concatenate((begin[shared], rests[alone])),
            np.concatenate((self.ends[shared, self.tree.depth[shared]], self.context[alone])),
            np.concatenate((self.tree.first[shared], alone)),
            np.concatenate((self.tree.end[shared] - self.tree.first[shared], 0 * alone + 1)),
        )
