"""Runs of shared decode cut into items: by chunks of tokens, and by as many requests as an item
has rows for.

They stay the same from step to step, but for the ends of what requests read for themselves, as long
as no run is cut otherwise; then a step's plan is little more than a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkernels.ops.prefix_tree import Ints
from kvkernels.ops.shared_costs import (
    AttentionShape,
    Costs,
    Work,
    padded_rows,
    partial_bytes_of_slot,
)
from kvkernels.ops.shared_runs import Runs, chunks_of, pieces_of, slots_of

if TYPE_CHECKING:
    from kvkernels.ops.shared_plan import SharedPlan

ITEM_WORDS = 8
END, SLOT = 3, 4  # columns of an item


class Items:
    """Of `runs` over requests in `order`. Lifetime: while steps have these runs and pieces."""

    def __init__(self, runs: Runs, order: Ints, shape: AttentionShape, costs: Costs) -> None:
        self.shape, self.groups = shape, int((runs.requests > 1).sum())
        tokens = runs.end - runs.begin
        chunk, pieces = chunks_of(tokens), np.maximum(pieces_of(tokens), 1)
        tiles = -(-runs.requests // shape.requests_of_item)
        slots = slots_of(runs.begin, runs.requests, pieces)
        copies = pieces * tiles
        run = np.repeat(np.arange(len(copies)), copies)
        number = np.arange(len(run)) - np.repeat(copies.cumsum() - copies, copies)
        piece, tile = number // tiles[run], number % tiles[run]
        self.begin = runs.begin[run] + piece * chunk[run]
        skipped = tile * shape.requests_of_item
        first = runs.first[run] + skipped
        requests = np.minimum(runs.requests[run] - skipped, shape.requests_of_item)
        self.rows = padded_rows(requests * shape.group)
        self.count = len(run)
        read = 1e-6 * costs.repeated_mb * shape.token_bytes
        computed = 1e-9 * costs.gflop * 4 * shape.head_dim * shape.kv_heads
        self._token_ns = read + computed * self.rows
        self._order, self._cells = order, np.zeros((self.count, ITEM_WORDS), dtype=np.int32)
        ends = np.minimum(self.begin + chunk[run], runs.end[run])
        for column, values in enumerate((first, requests, self.begin, ends)):
            self._cells[:, column] = values
        # What grows with its request: the last piece of what that reads for itself.
        self._growing = np.flatnonzero((piece == pieces[run] - 1) & (runs.requests[run] == 1))
        self._growing_of = order[first[self._growing]]
        self._take_slots(np.where(slots[run] > 0, requests, 0), first)

    def _take_slots(self, counts: Ints, first: Ints) -> None:
        """Every slot's item and place in it, by request and its tokens."""
        item = np.repeat(np.arange(self.count), counts)
        member = np.arange(len(item)) - np.repeat(counts.cumsum() - counts, counts)
        request = self._order[first[item] + member]
        merged = np.lexsort((self.begin[item], request))
        self._counts, self.slots = counts, len(item)
        self._merged_item, self._merged_member = item[merged], member[merged]
        self._merge_ends = np.bincount(request, minlength=len(self._order)).cumsum()

    def grow(self, context_tokens: Ints) -> None:
        """Take each request's own items to its end."""
        self._cells[self._growing, END] = context_tokens[self._growing_of]

    def tokens(self) -> Ints:
        """Of each item."""
        ends = self._cells[:, END].astype(np.int64)
        return ends - self.begin

    def fit(self, items: int, slots: int) -> bool:
        return self.count <= items and self.slots <= slots

    def work(self, distinct_tokens: int) -> Work:
        """Of one layer, in which requests have so many different tokens."""
        shape, tokens = self.shape, self.tokens()
        return Work(
            distinct_tokens * shape.token_bytes,
            (int(tokens.sum()) - distinct_tokens) * shape.token_bytes,
            4 * shape.head_dim * shape.kv_heads * int((tokens * self.rows).sum()),
            partial_bytes_of_slot(shape) * self.slots,
            self.count * shape.kv_heads,
        )

    def fill(self, made: SharedPlan) -> None:
        """Write the plan into `made`, which is zeros and has room for it."""
        by_cost = (-(self.tokens() * self._token_ns)).argsort(kind="stable")
        counts = self._counts[by_cost]
        slot = np.empty(self.count, dtype=np.int64)
        slot[by_cost] = np.where(counts > 0, counts.cumsum() - counts, -1)
        self._cells[:, SLOT] = slot
        made.items.numpy()[: self.count] = self._cells[by_cost]
        made.item_count[0] = self.count
        made.members.numpy()[:] = self._order
        merged = slot[self._merged_item] + self._merged_member
        made.merge_slots.numpy()[: self.slots] = merged
        made.merge_starts.numpy()[1:] = self._merge_ends
