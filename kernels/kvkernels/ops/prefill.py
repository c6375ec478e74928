"""Prefill: causal attention of many query tokens a request. Kernel: `cuda/prefill.cuh`.

`torch.ops.warmroute.prefill(q, k_pages, v_pages, page_table, item_count, items, scale, out, lse,
k_scales, v_scales)`:

    q, out              [tokens, heads, head_dim]
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn,
                        with equal strides
    page_table          int32[requests, pages]
    item_count, items   the plan of `plan_prefill`, made for this step
    scale               of scores, > 0; usually head_dim**-0.5
    lse                 float32[tokens, heads] or None: base-2 log-sum-exp of scaled scores
    k_scales, v_scales  as decode's: float32[page, token, kv_heads] where pages are quantized

Rows of q that no item has are left alone in `out` and `lse`. A row's bits depend on its own tokens
only, not on the items, the chunk or the batch.

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


class PrefillPlan(NamedTuple):
    """Views of one int32 tensor, `all`, so that one copy brings a plan to the device.

    `items` has (request, first row of q, tokens, position of the first) of each piece of work.
    What lies beyond the count is not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 4]

    def on(self, device: torch.device | str) -> PrefillPlan:
        """The same plan on `device`, by one copy."""
        return views(self.all.to(device))


def item_tokens(group: int) -> int:
    """Query tokens of an item, for `group` query heads a KV head. Raises ValueError."""
    if not 1 <= group <= ROWS:
        raise ValueError(f"{group} query heads a KV head: prefill has 1 to {ROWS}")
    return ROWS // group


def most_items(requests: int, tokens: int, group: int) -> int:
    """Enough items for any `requests` with `tokens` new ones together: for fixed buffers."""
    return requests + tokens // item_tokens(group)


def views(buffer: torch.Tensor) -> PrefillPlan:
    """`buffer` int32[4 + 4 * items] as a plan's parts; rows at multiples of 16 bytes."""
    return PrefillPlan(buffer, buffer[:1], buffer[4:].view(-1, 4))


def plan_prefill(
    spans: torch.Tensor,
    rows: int,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    group: int,
    items: int | None = None,
) -> PrefillPlan:
    """The plan of a step of R requests over `rows` rows of q, on the CPU.

    `spans` int[R, 3] has of each request its first row of q, its tokens in this step (0: not for
    prefill) and its context tokens, these included. `page_table` int[R, most pages] names its
    pages, below `pages`. `items` is the room of a fixed buffer (`most_items`), by default just
    enough. Raises ValueError for a table that does not hold the context, for tokens beyond q or
    the context, or for too many items.
    """
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
    check_table(torch.where(tokens > 0, context, 0), page_table.to("cpu"), pages, page_tokens)
    step = item_tokens(group)
    counts = -(-tokens // step)
    total = int(counts.sum())
    room = total if items is None else items
    if total > room:
        raise ValueError(f"{total} items do not fit into a plan of {room}")
    request = torch.repeat_interleave(torch.arange(len(spans)), counts)
    done = (torch.arange(total) - (counts.cumsum(0) - counts)[request]) * step
    own = torch.minimum(tokens[request] - done, torch.tensor(step))
    position = (context - tokens)[request] + done
    order = (position + own).argsort(descending=True, stable=True)
    plan = views(torch.zeros(4 + 4 * room, dtype=torch.int32))
    plan.item_count[0] = total
    made = torch.stack((request, first[request] + done, own, position), dim=1)
    plan.items[:total] = made[order].to(torch.int32)
    return plan


def unsupported(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> str:
    """Why the CUDA kernel cannot take this shape, by name; empty where it can."""
    return unsupported_shape(heads, kv_heads, head_dim, page_tokens, dtype, ROWS)


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """`torch.ops.warmroute.prefill` with a plan, and scales of K and V."""
    torch.ops.warmroute.prefill(
        *(q, k_pages, v_pages, page_table, *plan[1:], float(scale), out, lse, *scales)
    )


def prefill_on_cpu(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    item_count: torch.Tensor,
    items: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """In float64 where q is, else in float32."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_tokens, kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    for request, first, tokens, position in items[: int(item_count)].tolist():
        end = position + tokens
        pages = page_table[request, : -(-end // page_tokens)].long()
        k, v = (x[:end] for x in tokens_of((k_pages, v_pages), (k_scales, v_scales), pages, wide))
        rows = slice(first, first + tokens)
        query = q[rows].to(wide).view(tokens, kv_heads, group, -1) * scale
        at = torch.arange(end, device=q.device)
        seen = at <= at[position:, None]
        scores = torch.einsum("nhgd,thd->nhgt", query, k)
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        mixed = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v)
        out[rows] = mixed.flatten(1, 2).to(out.dtype)
        if lse is not None:
            sums = scores.logsumexp(-1) / math.log(2)
            lse[rows] = sums.flatten(1, 2).to(lse.dtype)


define("prefill", prefill_on_cpu, ("out", "lse"))
