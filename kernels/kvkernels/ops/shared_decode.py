"""The operator `shared_decode`: decode attention that reads pages that requests share once.

Its CUDA kernel is in `cuda/decode/shared_decode.cuh`.

`torch.ops.warmroute.shared_decode(q, k_pages, v_pages, page_table, item_count, items, members,
merge_starts, merge_slots, scale, out, partial, partial_lse, k_scales, v_scales)`:

    q, out              [requests, heads, head_dim]
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn,
                        with equal strides
    page_table          int32[requests, pages], dense. The plan says where in it a request's pages
                        begin, so that its memory may be larger than the table that was planned
    item_count ... merge_slots   the plan of `plan_shared`, made for this step
    scale               of scores, > 0; usually head_dim**-0.5
    partial             float32[slots, heads, head_dim], workspace: a slot for each of merge_slots
    partial_lse         float32[slots, heads], workspace: base-2 log-sum-exp of scaled scores
    k_scales, v_scales  float32[page, token, kv_heads] where pages are quantized, else None; with
                        equal strides, a page's tokens of one head side by side

On CUDA: bfloat16 and float16, head_dim 64 and 128, 1 to 16 query heads a KV head, pages of
multiples of 16 tokens (`unsupported` says what does not fit). What the plan and the table say is
not checked there: the planner has.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvkernels.ops.operator import check_table, define, tokens_of, unsupported_shape
from kvkernels.ops.shared_costs import (
    AttentionShape,
    Costs,
    Work,
    padded_rows,
    partial_bytes_of_slot,
)
from kvkernels.ops.shared_runs import (
    CHUNKS,
    LARGEST_CHUNK,
    Chooser,
    Ints,
    KeptTree,
    PrefixTree,
    Runs,
    chunks_of,
    pieces_of,
    slots_of,
    unchanged_until,
)

ITEM_WORDS = 8
END, SLOT, PAGES = 3, 4, 5  # columns of an item


class Items:
    """The items of work for `runs` over the requests in `order`. Lifetime: as long as steps have
    the same runs and pieces.
    """

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
        self._pages_of = order[first]  # the request whose pages are read
        ends = np.minimum(self.begin + chunk[run], runs.end[run])
        for column, values in enumerate((first, requests, self.begin, ends)):
            self._cells[:, column] = values
        # Items that grow with their request: the last piece of the tokens that it reads alone.
        self._growing = np.flatnonzero((piece == pieces[run] - 1) & (runs.requests[run] == 1))
        self._growing_of = order[first[self._growing]]
        self._take_slots(np.where(slots[run] > 0, requests, 0), first)

    def _take_slots(self, counts: Ints, first: Ints) -> None:
        """Give every slot its item and its place there, ordered by request and then by the
        request's tokens.
        """
        item = np.repeat(np.arange(self.count), counts)
        member = np.arange(len(item)) - np.repeat(counts.cumsum() - counts, counts)
        request = self._order[first[item] + member]
        merged = np.lexsort((self.begin[item], request))
        self._counts, self.slots = counts, len(item)
        self._merged_item, self._merged_member = item[merged], member[merged]
        self._merge_ends = np.bincount(request, minlength=len(self._order)).cumsum()

    def grow(self, context_tokens: Ints) -> None:
        """Extend the last items of each request to the end of its context, which has grown."""
        self._cells[self._growing, END] = context_tokens[self._growing_of]

    def tokens(self) -> Ints:
        """Return the number of tokens of each item."""
        ends = self._cells[:, END].astype(np.int64)
        return ends - self.begin

    def fit(self, items: int, slots: int) -> bool:
        return self.count <= items and self.slots <= slots

    def work(self, distinct_tokens: int) -> Work:
        """Return the work of one layer, in which all requests together have `distinct_tokens`
        different tokens.
        """
        shape, tokens = self.shape, self.tokens()
        return Work(
            distinct_tokens * shape.token_bytes,
            (int(tokens.sum()) - distinct_tokens) * shape.token_bytes,
            4 * shape.head_dim * shape.kv_heads * int((tokens * self.rows).sum()),
            partial_bytes_of_slot(shape) * self.slots,
            self.count * shape.kv_heads,
        )

    def fill(self, made: SharedPlan, pages: int) -> None:
        """Write the plan into `made`, which is zeros and has room for it; the page table has
        `pages` columns for each request.
        """
        by_cost = (-(self.tokens() * self._token_ns)).argsort(kind="stable")
        counts = self._counts[by_cost]
        slot = np.empty(self.count, dtype=np.int64)
        slot[by_cost] = np.where(counts > 0, counts.cumsum() - counts, -1)
        self._cells[:, SLOT], self._cells[:, PAGES] = slot, self._pages_of * pages
        made.items.numpy()[: self.count] = self._cells[by_cost]
        made.item_count[0] = self.count
        made.members.numpy()[:] = self._order
        merged = slot[self._merged_item] + self._merged_member
        made.merge_slots.numpy()[: self.slots] = merged
        made.merge_starts.numpy()[1:] = self._merge_ends


RUNS = 3  # that a request has room for: two shared ones and its own


class SharedPlan(NamedTuple):
    """The plan of a decode step. Its fields are views of one int32 tensor, `all`, so that one copy
    brings the plan to the device.

    `items` has (first of `members`, requests, first token, end, first slot, where in the page table
    the first member's pages begin, 0, 0) of each piece of work, most expensive first; slot -1 means
    that it is the only item of its one request. The slots of request r are
    merge_slots[merge_starts[r] : merge_starts[r + 1]]. Entries beyond the counts are not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 8]
    members: torch.Tensor  # [requests]
    merge_starts: torch.Tensor  # [requests + 1]
    merge_slots: torch.Tensor  # [most slots]

    def on(self, device: torch.device | str) -> SharedPlan:
        """Return the same plan on `device`, by one copy."""
        return views(self.all.to(device), len(self.members), len(self.items), len(self.merge_slots))


class Saving(NamedTuple):
    """The savings of a plan that reads shared runs of tokens once in a step.

    `shared_prefix_groups` counts the runs of tokens that several requests share; `kv_bytes_saved`
    is the KV that plain decode would have read beyond this plan, in all layers; the times are the
    cost model's, for one layer.
    """

    shared_prefix_groups: int
    kv_bytes_saved: int
    plan_ns: float
    plain_ns: float


class Step(NamedTuple):
    """The plan of one step, with what it saves, its work and its sizes."""

    plan: SharedPlan
    saving: Saving
    work: Work


def most_items(requests: int, tokens: int) -> int:
    """Return a number of items that is enough for any plan of `requests` whose contexts have
    `tokens` tokens together.
    """
    return requests * CHUNKS + tokens // LARGEST_CHUNK


def most_slots(requests: int, tokens: int) -> int:
    """Return the number of slots with which most steps can share. A step that would need more slots
    shares nothing, and then fits.
    """
    return requests * RUNS * CHUNKS + tokens // LARGEST_CHUNK


def views(buffer: torch.Tensor, requests: int, items: int, slots: int) -> SharedPlan:
    """Return `buffer` int32[words(requests, items, slots)] as the parts of a plan."""
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
    """Return the length of the int32 buffer of a plan with these sizes."""
    return 5 + ITEM_WORDS * items + 2 * requests + slots


class SharedPlanner:
    """Plans decode steps one after another and reuses what has not changed; each plan equals the
    plan that the step would get as the first one. Lifetime: worker.
    """

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
        """Return the plan of a step of R requests, on the CPU. `context_tokens` int[R] has the
        tokens to which each request attends, its own token included; 0 is a padding row, whose
        output is zeros. `page_table` int[R, most pages] names its pages. Only pages that are full
        for all of a group are shared. `room` has the items and slots of a fixed buffer
        (`most_items`, `most_slots`), by default just enough, with no more slots than `most_slots`.
        Raises ValueError for a table that does not hold the context, or if not even a plan that
        shares nothing fits.
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
        items.fill(made, table.shape[1])
        distinct = _distinct_tokens(tree, lengths, self._page_tokens)
        work, plain = items.work(distinct), _plain_work(lengths, distinct, self._shape)
        saved = plain.repeated_bytes - work.repeated_bytes
        costs = self._costs
        saving = Saving(items.groups, saved * self._shape.layers, costs.of(work), costs.of(plain))
        return Step(made, saving, work)

    def _items(self, tree: PrefixTree, lengths: Ints, room: tuple[int, int] | None) -> Items:
        """Return the items of the cheapest runs, or of plain decode if the cheapest runs do not
        fit.
        """
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
        """Choose new runs of pages to share, and keep them as long as the data that they depend on
        does not change.
        """
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
    """Return the plan of one step, as `SharedPlanner.step` does for its first step."""
    return SharedPlanner(pages, page_tokens, shape, costs).step(context_tokens, page_table, room)


def _plain_work(lengths: Ints, distinct_tokens: int, shape: AttentionShape) -> Work:
    """Return the work of plain decode in one layer."""
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
    """Return the number of different tokens of all requests; the tokens of a shared page count
    once.
    """
    above = np.where(tree.parent >= 0, tree.pages[tree.parent], 0)
    twice = (tree.pages - above) * (tree.end - tree.first - 1)
    return int(lengths.sum() - page_tokens * twice.sum())


MAX_GROUP = 16


def unsupported(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> str:
    """Return the reason why the CUDA kernel does not support this shape; "" if it supports it."""
    return unsupported_shape(heads, kv_heads, head_dim, page_tokens, dtype, MAX_GROUP)


class Splits(Protocol):
    """The interface of plans that split work: of decode, shared decode or prefill."""

    @property
    def merge_slots(self) -> torch.Tensor: ...


def workspace_of(
    plan: Splits, heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the workspace (partial, partial_lse) with room for all partial results of a plan of
    this size.
    """
    slots = len(plan.merge_slots)
    return (
        torch.empty(slots, heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(slots, heads, dtype=torch.float32, device=device),
    )


def workspace_bytes(slots: int, heads: int, head_dim: int) -> int:
    """Return the number of bytes of the workspace for a plan with room for `slots` slots."""
    return slots * heads * (head_dim + 1) * torch.float32.itemsize


def shared_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: SharedPlan,
    scale: float,
    out: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Call `torch.ops.warmroute.shared_decode` with a plan, its `workspace_of`, and the scales of K
    and V.
    """
    torch.ops.warmroute.shared_decode(
        *(q, k_pages, v_pages, page_table, *plan[1:], float(scale), out, *workspace, *scales)
    )


def shared_decode_on_cpu(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    item_count: torch.Tensor,
    items: torch.Tensor,
    members: torch.Tensor,
    merge_starts: torch.Tensor,
    merge_slots: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Compute the operator on the CPU, in float64 if q is float64, else in float32. It follows the
    plan's items: the keys of the first member are used for all members of an item, and one softmax
    covers all results of a request's items.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_tokens, kv_heads = k_pages.shape[1:3]
    scores: list[list[torch.Tensor]] = [[] for _ in q]
    values: list[list[torch.Tensor]] = [[] for _ in q]
    cells = page_table.flatten()
    for first, requests, begin, end, _, pages_at, *_ in items[: int(item_count)].tolist():
        own = members[first : first + requests].tolist()
        # Items begin with a tile, not with a page.
        pages = cells[pages_at + begin // page_tokens : pages_at + -(-end // page_tokens)].long()
        skipped = begin // page_tokens * page_tokens
        k, v = (
            x[begin - skipped : end - skipped]
            for x in tokens_of((k_pages, v_pages), (k_scales, v_scales), pages, wide)
        )
        for request in own:
            query = q[request].to(wide).view(kv_heads, -1, q.shape[2]) * scale
            scores[request].append(torch.einsum("hgd,thd->hgt", query, k))
            values[request].append(v)
    for request in range(len(q)):
        weights = torch.cat(scores[request], dim=-1).softmax(-1)
        mixed = torch.einsum("hgt,thd->hgd", weights, torch.cat(values[request]))
        out[request] = mixed.flatten(0, 1).to(out.dtype)


define("shared_decode", shared_decode_on_cpu, ("out", "partial", "partial_lse"))
