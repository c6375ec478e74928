"""What shared decode's CTAs compute, made on the host once a step for all layers.

A run of tokens that several requests share is cut by its own length, as decode cuts a request. So a
request's numbers depend on where its shared runs begin and end and on whether it shares them, but
not on with whom; one that shares nothing has decode's bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvkernels.ops.decode_plan import CHUNKS, LARGEST_CHUNK
from kvkernels.ops.page_tables import check_table
from kvkernels.ops.prefix_tree import Ints, PrefixTree, prefix_tree
from kvkernels.ops.shared_costs import (
    AttentionShape,
    Costs,
    Work,
    padded_rows,
    partial_bytes_of_slot,
)
from kvkernels.ops.shared_runs import Chooser, Runs, chunks_of, pieces_of, slots_of

ITEM_WORDS = 8
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


def plan_shared(
    context_tokens: torch.Tensor,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    shape: AttentionShape,
    costs: Costs | None = None,
    room: tuple[int, int] | None = None,
) -> Step:
    """The plan of a step of R requests, on the CPU.

    `context_tokens` int[R] is what each attends to, its own token included; 0 is a padding row,
    whose output is zeros. `page_table` int[R, most pages] names its pages, below `pages`. Only
    pages that are full for all of a group are shared. `room` has the items and slots of a fixed
    buffer (`most_items`, `most_slots`), by default just enough, with no more slots than
    `most_slots`. Raises ValueError for a table that does not hold the context, or where even what
    shares nothing does not fit.
    """
    context = context_tokens.to("cpu", torch.int64)
    table = page_table.to("cpu", torch.int32)
    check_table(context, table, pages, page_tokens)
    lengths = context.numpy()
    costs = costs or Costs()
    tree = prefix_tree(table.numpy(), lengths // page_tokens)
    plain = Runs(0 * lengths, lengths[tree.order], np.arange(len(lengths)), 0 * lengths + 1)
    runs = plain
    if len(tree.first):
        runs = Chooser(tree, lengths[tree.order], page_tokens, shape, costs).choose()
    distinct = _distinct_tokens(tree, lengths, page_tokens)
    made = _Items(runs, shape, costs)
    tokens = int(lengths.sum())
    if not made.fit(room or (made.count, most_slots(len(lengths), tokens))):
        runs, made = plain, _Items(plain, shape, costs)
    if room and not made.fit(room):
        raise ValueError(f"{made.count} items, {made.slots} slots do not fit into a plan of {room}")
    work = made.work(distinct)
    saving = Saving(
        int((runs.requests > 1).sum()),
        (tokens - made.tokens_read()) * shape.token_bytes * shape.layers,
        costs.of(work),
        costs.of(_plain_work(lengths, distinct, shape)),
    )
    return Step(made.plan(tree.order, room or (made.count, made.slots)), saving, work)


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


class _Items:
    """Runs cut into items: by chunks of tokens, and by as many requests as an item has rows for."""

    def __init__(self, runs: Runs, shape: AttentionShape, costs: Costs) -> None:
        self.shape = shape
        tokens = runs.end - runs.begin
        chunk, pieces = chunks_of(tokens), np.maximum(pieces_of(tokens), 1)
        tiles = -(-runs.requests // shape.requests_of_item)
        slots = slots_of(runs.begin, runs.requests, pieces)
        copies = pieces * tiles
        run = np.repeat(np.arange(len(copies)), copies)
        number = np.arange(len(run)) - np.repeat(copies.cumsum() - copies, copies)
        piece, tile = number // tiles[run], number % tiles[run]
        self.begin = runs.begin[run] + piece * chunk[run]
        self.end = np.minimum(self.begin + chunk[run], runs.end[run])
        skipped = tile * shape.requests_of_item
        self.first = runs.first[run] + skipped
        self.requests = np.minimum(runs.requests[run] - skipped, shape.requests_of_item)
        self.has_slots = slots[run] > 0
        self.rows = padded_rows(self.requests * shape.group)
        self.count = len(run)
        self.slots = int(self.requests[self.has_slots].sum())
        read = 1e-6 * costs.repeated_mb * shape.token_bytes
        computed = 1e-9 * costs.gflop * 4 * shape.head_dim * shape.kv_heads
        self.ns = (self.end - self.begin) * (read + computed * self.rows)

    def fit(self, room: tuple[int, int]) -> bool:
        return self.count <= room[0] and self.slots <= room[1]

    def tokens_read(self) -> int:
        return int((self.end - self.begin).sum())

    def work(self, distinct_tokens: int) -> Work:
        """Of one layer."""
        shape, tokens = self.shape, self.end - self.begin
        return Work(
            distinct_tokens * shape.token_bytes,
            (self.tokens_read() - distinct_tokens) * shape.token_bytes,
            4 * shape.head_dim * shape.kv_heads * int((tokens * self.rows).sum()),
            partial_bytes_of_slot(shape) * self.slots,
            self.count * shape.kv_heads,
        )

    def plan(self, order: Ints, room: tuple[int, int]) -> SharedPlan:
        requests = len(order)
        made = views(torch.zeros(words(requests, *room), dtype=torch.int32), requests, *room)
        by_cost = (-self.ns).argsort(kind="stable")
        counts = np.where(self.has_slots, self.requests, 0)[by_cost]
        slot = np.where(counts > 0, counts.cumsum() - counts, -1)
        items = made.items.numpy()
        columns = (self.first, self.requests, self.begin, self.end)
        for number, column in enumerate(columns):
            items[: self.count, number] = column[by_cost]
        items[: self.count, 4] = slot
        made.item_count[0] = self.count
        made.members.numpy()[:] = order
        # Every slot's request and first token, in the order of slots.
        item = np.repeat(by_cost, counts)
        member = np.arange(self.slots) - np.repeat(counts.cumsum() - counts, counts)
        request = order[self.first[item] + member]
        made.merge_slots.numpy()[: self.slots] = np.lexsort((self.begin[item], request))
        made.merge_starts.numpy()[1:] = np.bincount(request, minlength=requests).cumsum()
        return made
