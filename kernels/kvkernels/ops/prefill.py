"""The operator `prefill`: causal attention of many query tokens for each request.

Its CUDA kernel is in `cuda/prefill/prefill.cuh`.

`torch.ops.warmroute.prefill(q, k_pages, v_pages, page_table, item_count, items, merge_starts,
merge_slots, scale, out, lse, partial, partial_lse, k_scales, v_scales)`:

    q, out              [tokens, heads, head_dim]
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn,
                        with equal strides
    page_table          int32[requests, pages]
    item_count ... merge_slots   the plan of `plan_prefill`, made for this step
    scale               of scores, > 0; usually head_dim**-0.5
    lse                 float32[tokens, heads] or None: base-2 log-sum-exp of scaled scores
    partial             float32[slots, heads, head_dim], workspace: a slot for each of merge_slots
    partial_lse         float32[slots, heads], workspace
    k_scales, v_scales  as decode's: float32[page, token, kv_heads] where pages are quantized

Rows of q that no item has are left alone in `out` and `lse`. A row's bits depend on its own tokens
and on where its keys are cut: not on the items' rows or the batch.

On CUDA: bfloat16 and float16, head_dim 64 and 128, 1 to 128 query heads a KV head, pages of
multiples of 16 tokens (`unsupported` says what does not fit). What the plan and the table say is
not checked there: `plan_prefill` has.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvkernels.ops.operator import check_table, define, tokens_of, unsupported_shape

ROWS = 128  # of a CTA: query tokens times the heads of a group
MAX_CONTEXT = 1 << 30
ITEM_WORDS = 8
# Keys are cut where a chunk alone has fewer CTAs than this: a constant and not the device's, so
# that bits are the same on every GPU. The SMs of an H100 are 132.
FILLING_CTAS = 128
PIECE_STEP, LEAST_PIECE = 128, 512  # keys
MOST_SLOTS = 4096  # of a step; one that needs more has enough items without


class PrefillPlan(NamedTuple):
    """The plan of a prefill step. Its fields are views of one int32 tensor, `all`, so that one copy
    brings the plan to the device.

    `items` has (request, first row of q, tokens, position of the first, first key, end of the keys,
    first slot, 0) of each piece of work, longest first. An item with slot -1 has all keys of its
    rows; otherwise row n of the item writes to slot + n. The slots of row r of q are
    merge_slots[merge_starts[r] : merge_starts[r + 1]]. Entries beyond the count are not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 8]
    merge_starts: torch.Tensor  # [rows + 1]
    merge_slots: torch.Tensor  # [slots]

    def on(self, device: torch.device | str) -> PrefillPlan:
        """Return the same plan on `device`, by one copy."""
        sizes = len(self.merge_starts) - 1, len(self.items), len(self.merge_slots)
        return views(self.all.to(device), *sizes)


def item_tokens(group: int) -> int:
    """Return the number of query tokens in an item of work, for `group` query heads a KV head.
    Raises ValueError for a group that is out of range.
    """
    if not 1 <= group <= ROWS:
        raise ValueError(f"{group} query heads a KV head: prefill has 1 to {ROWS}")
    return ROWS // group


def most_items(requests: int, tokens: int, group: int) -> int:
    """Return a number of items that is enough for any `requests` with `tokens` new tokens together,
    if their keys are not split.
    """
    return requests + tokens // item_tokens(group)


def words(rows: int, items: int, slots: int) -> int:
    """Return the length of the int32 buffer of a plan with these sizes."""
    return 5 + ITEM_WORDS * items + rows + slots


def views(buffer: torch.Tensor, rows: int, items: int, slots: int) -> PrefillPlan:
    """Return `buffer` int32[words(rows, items, slots)] as the parts of a plan."""
    starts = 4 + ITEM_WORDS * items
    merged = starts + rows + 1
    return PrefillPlan(
        buffer,
        buffer[:1],
        buffer[4:starts].view(items, ITEM_WORDS),  # rows at multiples of 16 bytes
        buffer[starts:merged],
        buffer[merged : merged + slots],
    )


def piece_keys(
    tokens: torch.Tensor, context: torch.Tensor, page_tokens: int, group: int, kv_heads: int
) -> torch.Tensor:
    """Return the number of keys in one piece of each chunk's keys, int64[R], in full pages.

    The chunks have `tokens` tokens at the end of `context`. It is MAX_CONTEXT for a chunk that has
    enough CTAs without a split. It depends on the request alone, so that neither batch nor device
    changes its bits.
    """
    step = math.lcm(PIECE_STEP, page_tokens)
    ctas = -(-tokens // item_tokens(group)) * kv_heads
    wanted = FILLING_CTAS // ctas.clamp_min(1)
    steps = (-(-context // (wanted.clamp_min(1) * step))).clamp_min(-(-LEAST_PIECE // step))
    return torch.where(wanted > 1, steps * step, MAX_CONTEXT)


def plan_prefill(
    spans: torch.Tensor,
    rows: int,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    group: int,
    items: int | None = None,
    kv_heads: int | None = None,
) -> PrefillPlan:
    """Return the plan of a step of R requests over `rows` rows of q, on the CPU.

    `spans` int[R, 3] has, for each request, its first row of q, its tokens in this step (0: the
    request has no prefill) and its context tokens, which include those. `page_table` int[R, most
    pages] names its pages, each below `pages`. `items` is the room of a fixed buffer
    (`most_items`), by default just enough. `kv_heads` is the number of KV heads of the launch, by
    which the keys of chunks with few items are split (`piece_keys`); None means that no keys are
    split. Raises ValueError for a table that does not hold the context, for tokens beyond q or the
    context, or for too many items.
    """
    spans = _checked(spans, rows)
    first, tokens, context = spans.unbind(1)
    check_table(torch.where(tokens > 0, context, 0), page_table.to("cpu"), pages, page_tokens)
    keys = torch.full_like(tokens, MAX_CONTEXT)
    if kv_heads is not None:
        keys = piece_keys(tokens, context, page_tokens, group, kv_heads)
    made = _cut(first, tokens, context, keys, item_tokens(group))
    if int(_slots_of(made).sum()) > MOST_SLOTS:
        made = _cut(first, tokens, context, torch.full_like(keys, MAX_CONTEXT), item_tokens(group))
    room = len(made) if items is None else items
    if len(made) > room:
        raise ValueError(f"{len(made)} items do not fit into a plan of {room}")
    return _filled(made, rows, room)


def _checked(spans: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `spans` as int64 on the CPU. Raises ValueError for invalid spans."""
    spans = spans.to("cpu", torch.int64)
    if spans.dim() != 2 or spans.shape[1] != 3:
        raise ValueError(f"spans have shape {list(spans.shape)}, need [requests, 3]")
    first, tokens, context = spans.unbind(1)
    bad = (first < 0) | (tokens < 0) | (tokens > context) | (first + tokens > rows)
    bad |= context > MAX_CONTEXT
    for row in bad.nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"request {row} has {int(tokens[row])} tokens from row {int(first[row])} of {rows} on, "
            f"in a context of {int(context[row])} (at most {MAX_CONTEXT})"
        )
    return spans


def _cut(
    first: torch.Tensor, tokens: torch.Tensor, context: torch.Tensor, keys: torch.Tensor, step: int
) -> torch.Tensor:
    """Return the items of work without slots, int64[N, 7]: runs of `step` tokens, each split at
    those multiples of `keys` that its first token sees. The columns are request, row, tokens,
    position, first key, end, pieces.
    """
    counts = -(-tokens // step)
    request = torch.repeat_interleave(torch.arange(len(tokens)), counts)
    done = (torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]) * step
    own = torch.minimum(tokens[request] - done, torch.tensor(step))
    position = (context - tokens)[request] + done
    pieces = position // keys[request] + 1
    run = torch.repeat_interleave(torch.arange(len(request)), pieces)
    number = torch.arange(len(run)) - (pieces.cumsum(0) - pieces)[run]
    begin = number * keys[request[run]]
    is_last = number == pieces[run] - 1
    end = torch.where(is_last, (position + own)[run], begin + keys[request[run]])
    columns = (request[run], (first[request] + done)[run], own[run], position[run])
    return torch.stack((*columns, begin, end, pieces[run]), dim=1)


def _slots_of(made: torch.Tensor) -> torch.Tensor:
    """Return the number of slots for partial results of each item that `_cut` returned."""
    return torch.where(made[:, 6] > 1, made[:, 2], 0)


def _filled(made: torch.Tensor, rows: int, room: int) -> PrefillPlan:
    """Return the plan of the items that `_cut` returned, longest first, with the slots of each row
    in order of its keys.
    """
    counts = _slots_of(made)
    slot = torch.where(counts > 0, counts.cumsum(0) - counts, -1)
    total = int(counts.sum())
    plan = views(torch.zeros(words(rows, room, total), dtype=torch.int32), rows, room, total)
    plan.item_count[0] = len(made)
    order = (made[:, 5] - made[:, 4]).argsort(descending=True, stable=True)
    plan.items[: len(made), :6] = made[order, :6].to(torch.int32)
    plan.items[: len(made), 6] = slot[order].to(torch.int32)
    item = torch.repeat_interleave(torch.arange(len(made)), counts)
    row = made[item, 1] + torch.arange(total) - slot[item]
    plan.merge_slots[:] = row.argsort(stable=True).to(torch.int32)  # pieces come in order of keys
    plan.merge_starts[1:] = torch.bincount(row, minlength=rows).cumsum(0).to(torch.int32)
    return plan


def unsupported(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> str:
    """Return the reason why the CUDA kernel does not support this shape; "" if it supports it."""
    return unsupported_shape(heads, kv_heads, head_dim, page_tokens, dtype, ROWS)


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    out: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor],
    lse: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    is_mma: bool = False,
) -> None:
    """Call `torch.ops.warmroute.prefill` with a plan, its `workspace_of`, and the scales of K and
    V. With `is_mma`, the kernel for all GPUs is used on Hopper, too.
    """
    run = torch.ops.warmroute.prefill_mma if is_mma else torch.ops.warmroute.prefill
    pages = k_pages, v_pages, page_table
    run(q, *pages, *plan[1:], float(scale), out, lse, *workspace, *scales)


def prefill_on_cpu(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    item_count: torch.Tensor,
    items: torch.Tensor,
    merge_starts: torch.Tensor,
    merge_slots: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Compute the operator on the CPU, in float64 if q is float64, else in float32, with keys in
    the same pieces as the kernel.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_tokens, kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    pieces = torch.empty(partial.shape, dtype=wide, device=q.device)
    sums = torch.empty(partial_lse.shape, dtype=wide, device=q.device)
    for request, first, tokens, position, begin, end, slot, _ in items[: int(item_count)].tolist():
        whole = slice(begin // page_tokens, -(-end // page_tokens))
        skipped = begin // page_tokens * page_tokens
        pages = page_table[request, whole].long()
        k, v = (
            x[begin - skipped : end - skipped]
            for x in tokens_of((k_pages, v_pages), (k_scales, v_scales), pages, wide)
        )
        rows = slice(first, first + tokens)
        query = q[rows].to(wide).view(tokens, kv_heads, group, -1) * scale
        at = torch.arange(position + tokens, device=q.device)
        seen = at[begin:end] <= at[position:, None]
        scores = torch.einsum("nhgd,thd->nhgt", query, k)
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        mixed = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v).flatten(1, 2)
        own = scores.logsumexp(-1).flatten(1, 2) / math.log(2)
        if slot >= 0:
            pieces[slot : slot + tokens], sums[slot : slot + tokens] = mixed, own
            continue
        out[rows] = mixed.to(out.dtype)
        if lse is not None:
            lse[rows] = own.to(lse.dtype)
    starts = merge_starts.tolist()
    for row in range(len(q)):
        if starts[row] == starts[row + 1]:
            continue
        slots = merge_slots[starts[row] : starts[row + 1]].long()
        scaled = sums[slots] * math.log(2)
        out[row] = torch.einsum("sh,shd->hd", scaled.softmax(0), pieces[slots]).to(out.dtype)
        if lse is not None:
            lse[row] = (scaled.logsumexp(0) / math.log(2)).to(lse.dtype)


WRITTEN = ("out", "lse", "partial", "partial_lse")
define("prefill", prefill_on_cpu, WRITTEN)
define("prefill_mma", prefill_on_cpu, WRITTEN)
