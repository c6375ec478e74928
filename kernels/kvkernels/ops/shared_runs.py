"""Which runs of a prefix tree to share: the cheapest choice, by dynamic programming.

A run is (tokens [begin, end), requests side by side in the tree's order). At each node of the tree
its requests either share all that no ancestor has shared up to its end, or carry it on to their
children; a request reads alone what is left. Every choice is one of sums of independent parts, so
the best one is found exactly; that all carry everything, plain decode, is one of them.

What a request has beyond its last node costs the same whatever is chosen, but for the pieces it is
cut into. So while these stay as many (`Chooser.unchanged_until`), the choice does, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkernels.ops.decode_plan import CHUNK_STEP, CHUNKS, LARGEST_CHUNK, LEAST_CHUNK
from kvkernels.ops.prefix_tree import LEVELS, Ints, PrefixTree
from kvkernels.ops.shared_costs import AttentionShape, Costs, run_cost

Floats = NDArray[np.float64]


class Runs(NamedTuple):
    """Each row of arrays int64[runs] one run; those of one request cover its tokens once."""

    begin: Ints
    end: Ints
    first: Ints  # of the tree's order
    requests: Ints


def pieces_of(tokens: Ints) -> Ints:
    """Items in which a run of `tokens` is computed: cut as decode cuts a request of that length."""
    cut: Ints = -(-tokens // chunks_of(tokens))
    return cut


def chunks_of(tokens: Ints) -> Ints:
    """`decode_plan.chunk_tokens`, for numpy."""
    eighth: Ints = -(-tokens // (CHUNKS * CHUNK_STEP)) * CHUNK_STEP
    return np.clip(eighth, LEAST_CHUNK, LARGEST_CHUNK)


def unchanged_until(tokens: Ints) -> Ints:
    """Up to how many tokens a run of at least `tokens` is cut into as many pieces, as long: what
    fills them, since a chunk grows where there would be more than CHUNKS."""
    filled: Ints = pieces_of(tokens) * chunks_of(tokens)
    return filled


def slots_of(begin: Ints, requests: Ints, pieces: Ints) -> Ints:
    """Partial results of each request. All that a request has, in one piece, needs no merge."""
    return np.where((begin == 0) & (pieces <= 1) & (requests == 1), 0, pieces)


class Chooser:
    """One step's choice. `context_tokens` in the tree's order."""

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
        # Row -1 stands for no node: what begins at token 0.
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
        """[requests, levels]: what each reads for itself from each ancestor's end to its last
        node's, in the pieces of all that it reads."""
        begin, last = self.ends[self.leaf, :levels], self.ends[self.leaf, self.depth[self.leaf]]
        one, pieces = np.ones(1, dtype=np.int64), pieces_of(self.context[:, None] - begin)
        slots = slots_of(begin, one, pieces)
        return run_cost(self.costs, self.shape, last[:, None] - begin, one, pieces, slots)

    def unchanged_until(self) -> Ints:
        """Context tokens of each request up to which the choice stays, from these on."""
        begin = self.ends[self.leaf, : self.deepest + 1]
        until = begin + unchanged_until(self.context[:, None] - begin)
        is_own = np.arange(self.deepest + 1) <= self.depth[self.leaf][:, None]
        least: Ints = np.where(is_own, until, np.iinfo(np.int64).max).min(axis=1)
        return least

    def choose(self) -> Runs:
        """The cheapest runs; every request's come in the order of their tokens."""
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
        """The runs of the choices made, from the roots on."""
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
