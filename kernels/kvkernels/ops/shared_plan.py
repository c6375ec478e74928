"""What shared decode's CTAs compute, made on the host once a step for all layers.

A run of tokens that several requests share is cut by its own length, as decode cuts a request. So a
request's numbers depend on where its shared runs begin and end and on whether it shares them, but
not on with whom; one that shares nothing has decode's bits.

A step's plan does not depend on the steps before. What goes on as it was, though, is not made anew:
the tree of prefixes, the choice of runs, the items that they are cut into.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvkernels.ops.decode_plan import CHUNKS, LARGEST_CHUNK
from kvkernels.ops.kept_tree import KeptTree
from kvkernels.ops.page_tables import check_table
from kvkernels.ops.prefix_tree import Ints, PrefixTree
from kvkernels.ops.shared_costs import (
    AttentionShape,
    Costs,
    Work,
    padded_rows,
    partial_bytes_of_slot,
)
from kvkernels.ops.shared_items import ITEM_WORDS, Items
from kvkernels.ops.shared_runs import Chooser, Runs, pieces_of, slots_of, unchanged_until

RUNS = 3  # that a request has room for: two shared ones and its own


class SharedPlan(NamedTuple):
    """Views of one int32 tensor, `all`, so that one copy brings a plan to the device.

    `items` has (first of `members`, requests, first token, end, first slot, 0, 0, 0) of each piece
    of work, most expensive first; slot -1 is the only item of its one request. `merge_starts` and
    `merge_slots` are those of `DecodePlan`. What lies beyond the counts is not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 8]
    members: torch.Tensor  # [requests]
    merge_starts: torch.Tensor  # [requests + 1]
    merge_slots: torch.Tensor  # [most slots]

    def on(self, device: torch.device | str) -> SharedPlan:
        """The same plan on `device`, by one copy."""
        return views(self.all.to(device), len(self.members), len(self.items), len(self.merge_slots))


class Saving(NamedTuple):
    """What a plan's sharing does in one step.

    `shared_prefix_groups` counts the runs of tokens that several requests share; `kv_bytes_saved`
    is KV that plain decode would have read beyond this plan, in all layers; times are the cost
    model's, for one layer.
    """

    shared_prefix_groups: int
    kv_bytes_saved: int
    plan_ns: float
    plain_ns: float


class Step(NamedTuple):
    """A plan, and what is known of it."""

    plan: SharedPlan
    saving: Saving
    work: Work


def most_items(requests: int, tokens: int) -> int:
    """Items that fit any plan of `requests` whose contexts have `tokens` together."""
    return requests * CHUNKS + tokens // LARGEST_CHUNK


def most_slots(requests: int, tokens: int) -> int:
    """Slots with room to share. A step that would need more shares nothing, which fits."""
    return requests * RUNS * CHUNKS + tokens // LARGEST_CHUNK


def views(buffer: torch.Tensor, requests: int, items: int, slots: int) -> SharedPlan:
    """`buffer` int32[words(requests, items, slots)] as a plan's parts."""
    members = 4 + ITEM_WORDS * items
    starts = members + requests
    merged = starts + requests + 1
    return SharedPlan(
        buffer,
        buffer[:1],
        buffer[4:members].view(items, ITEM_WORDS),  # rows at multiples of 16 bytes
        buffer[members:starts],
        buffer[starts:merged],
        buffer[merged : merged + slots],
    )


def words(requests: int, items: int, slots: int) -> int:
    """Length of a plan's buffer."""
    return 5 + ITEM_WORDS * items + 2 * requests + slots


class SharedPlanner:
    """Plans steps one after another; each as if it were the first. Lifetime: worker."""

    def __init__(
        self, pages: int, page_tokens: int, shape: AttentionShape, costs: Costs | None = None
    ) -> None:
        self._pages, self._page_tokens = pages, page_tokens
        self._shape, self._costs = shape, costs or Costs()
        self._trees = KeptTree()
        self._tree: PrefixTree | None = None  # what the following was made for
        self._chosen: Items | None = None
        self._plain: Items | None = None  # the same without sharing, once it was needed
        self._from = self._until = np.zeros(0, dtype=np.int64)  # context tokens

    def step(
        self,
        context_tokens: torch.Tensor,
        page_table: torch.Tensor,
        room: tuple[int, int] | None = None,
    ) -> Step:
        """The plan of a step of R requests, on the CPU.

        `context_tokens` int[R] is what each attends to, its own token included; 0 is a padding
        row, whose output is zeros. `page_table` int[R, most pages] names its pages. Only pages
        that are full for all of a group are shared. `room` has the items and slots of a fixed
        buffer (`most_items`, `most_slots`), by default just enough, with no more slots than
        `most_slots`. Raises ValueError for a table that does not hold the context, or where even
        what shares nothing does not fit.
        """
        context = context_tokens.to("cpu", torch.int64)
        table = page_table.to("cpu", torch.int32)
        check_table(context, table, self._pages, self._page_tokens)
        lengths = context.numpy()
        tree = self._trees.of(table.numpy(), lengths // self._page_tokens)
        items = self._items(tree, lengths, room)
        items.grow(lengths)
        size = len(lengths), *(room or (items.count, items.slots))
        made = views(torch.zeros(words(*size), dtype=torch.int32), *size)
        items.fill(made)
        distinct = _distinct_tokens(tree, lengths, self._page_tokens)
        work, plain = items.work(distinct), _plain_work(lengths, distinct, self._shape)
        saved = plain.repeated_bytes - work.repeated_bytes
        costs = self._costs
        saving = Saving(items.groups, saved * self._shape.layers, costs.of(work), costs.of(plain))
        return Step(made, saving, work)

    def _items(self, tree: PrefixTree, lengths: Ints, room: tuple[int, int] | None) -> Items:
        """Those of the cheapest runs, or of plain decode where these do not fit."""
        is_kept = tree is self._tree
        if not (is_kept and (self._from <= lengths).all() and (lengths <= self._until).all()):
            self._choose(tree, lengths)
        assert self._chosen is not None
        items, slots = room or (self._chosen.count, most_slots(len(lengths), int(lengths.sum())))
        if self._chosen.fit(items, slots):
            return self._chosen
        if self._plain is None:
            runs = Runs(0 * lengths, lengths[tree.order], np.arange(len(lengths)), 0 * lengths + 1)
            self._plain = Items(runs, tree.order, self._shape, self._costs)
        if room and not self._plain.fit(*room):
            count, taken = self._plain.count, self._plain.slots
            raise ValueError(f"{count} items, {taken} slots do not fit into a plan of {room}")
        return self._plain

    def _choose(self, tree: PrefixTree, lengths: Ints) -> None:
        """Choose anew, for as long as what it depends on stays."""
        own = lengths[tree.order]
        runs = Runs(0 * lengths, own, np.arange(len(lengths)), 0 * lengths + 1)
        until = unchanged_until(own)
        if len(tree.first):
            chooser = Chooser(tree, own, self._page_tokens, self._shape, self._costs)
            runs, until = chooser.choose(), chooser.unchanged_until()
        self._tree, self._plain = tree, None
        self._chosen = Items(runs, tree.order, self._shape, self._costs)
        self._from, self._until = lengths.copy(), np.empty_like(lengths)
        self._until[tree.order] = until


def plan_shared(
    context_tokens: torch.Tensor,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    shape: AttentionShape,
    costs: Costs | None = None,
    room: tuple[int, int] | None = None,
) -> Step:
    """The plan of one step: `SharedPlanner.step`."""
    return SharedPlanner(pages, page_tokens, shape, costs).step(context_tokens, page_table, room)


def _plain_work(lengths: Ints, distinct_tokens: int, shape: AttentionShape) -> Work:
    """What decode does, one layer."""
    pieces = np.maximum(pieces_of(lengths), 1)
    slots, tokens = slots_of(0 * lengths, 0 * lengths + 1, pieces), int(lengths.sum())
    rows = int(padded_rows(np.asarray(shape.group)))
    return Work(
        distinct_tokens * shape.token_bytes,
        (tokens - distinct_tokens) * shape.token_bytes,
        4 * shape.head_dim * shape.kv_heads * tokens * rows,
        partial_bytes_of_slot(shape) * int(slots.sum()),
        int(pieces.sum()) * shape.kv_heads,
    )


def _distinct_tokens(tree: PrefixTree, lengths: Ints, page_tokens: int) -> int:
    """Tokens of all requests, those of a shared page once."""
    above = np.where(tree.parent >= 0, tree.pages[tree.parent], 0)
    twice = (tree.pages - above) * (tree.end - tree.first - 1)
    return int(lengths.sum() - page_tokens * twice.sum())
