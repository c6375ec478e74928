"""Plain decode, which shared decode is held to: each request reads all of its own pages.

Its kernel is `kernels/cuda/decode.cuh`; the engine's steps go by `shared_decode` alone.

`torch.ops.warmroute.decode(q, k_pages, v_pages, page_table, item_count, items, merge_starts,
merge_slots, scale, out, partial, partial_lse, k_scales, v_scales)`:

    q, out              [requests, heads, head_dim]
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn,
                        with equal strides
    page_table          int32[requests, pages]
    item_count ... merge_slots   the plan of `plan_decode`, made for this step
    scale               of scores, > 0; usually head_dim**-0.5
    partial             float32[slots, heads, head_dim], workspace: a slot for each of merge_slots
    partial_lse         float32[slots, heads], workspace: base-2 log-sum-exp of scaled scores
    k_scales, v_scales  float32[page, token, kv_heads] where pages are quantized, else None; with
                        equal strides, a page's tokens of one head side by side

What the plan and the table say is not checked on CUDA: `plan_decode` has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvkernels.ops.operator import check_table, define, tokens_of
from kvkernels.ops.shared_runs import CHUNK_STEP, CHUNKS, LARGEST_CHUNK, LEAST_CHUNK


class DecodePlan(NamedTuple):
    """Views of one int32 tensor, `all`, so that one copy brings a plan to the device.

    `items` has (request, first token, end, slot) of each piece of work, longest first; slot -1 is
    the only item of its request. The slots of request r are
    merge_slots[merge_starts[r] : merge_starts[r + 1]]. What lies beyond the counts is not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 4]
    merge_starts: torch.Tensor  # [requests + 1]
    merge_slots: torch.Tensor  # [most items]

    def on(self, device: torch.device | str) -> DecodePlan:
        """The same plan on `device`, by one copy."""
        return views(self.all.to(device), len(self.merge_starts) - 1, len(self.items))


def chunk_tokens(context_tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of an item for requests of `context_tokens` int64[R]; multiples of 64.

    An eighth of the request, within [256, 1024]: shorter ones cost more in partial results than
    they gain in parallelism, longer ones leave a request alone on too few SMs.
    """
    eighth = -(-context_tokens // (CHUNKS * CHUNK_STEP)) * CHUNK_STEP
    return eighth.clamp(LEAST_CHUNK, LARGEST_CHUNK)


def views(buffer: torch.Tensor, requests: int, items: int) -> DecodePlan:
    """`buffer` int32[words(requests, items)] as a plan's parts."""
    table, starts = 4 + 4 * items, 5 + 4 * items + requests
    return DecodePlan(
        buffer,
        buffer[:1],
        buffer[4:table].view(items, 4),  # rows at multiples of 16 bytes
        buffer[table:starts],
        buffer[starts : starts + items],
    )


def words(requests: int, items: int) -> int:
    """Length of a plan's buffer."""
    return 5 + 5 * items + requests


def plan_decode(
    context_tokens: torch.Tensor,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    items: int | None = None,
) -> DecodePlan:
    """The plan of a step of R requests, on the CPU.

    `context_tokens` int[R] is what each attends to, its own token included; 0 is a padding row,
    whose output is zeros. `page_table` int[R, most pages] names its pages, below `pages`. `items`
    is the room of a fixed buffer (`most_items`), by default just enough. Raises ValueError for a
    table that does not hold the context, or for too many items.
    """
    context = context_tokens.to("cpu", torch.int64)
    check_table(context, page_table.to("cpu"), pages, page_tokens)
    chunk = chunk_tokens(context)
    counts = (-(-context // chunk)).clamp_min(1)  # padding has one item of no tokens
    total = int(counts.sum())
    room = total if items is None else items
    if total > room:
        raise ValueError(f"{total} items do not fit into a plan of {room}")
    requests = len(context)
    plan = views(torch.zeros(words(requests, room), dtype=torch.int32), requests, room)
    request = torch.repeat_interleave(torch.arange(requests), counts)
    first = counts.cumsum(0) - counts
    begin = (torch.arange(total) - first[request]) * chunk[request]
    end = torch.minimum(begin + chunk[request], context[request])
    is_split = counts[request] > 1
    slot = torch.where(is_split, is_split.cumsum(0) - 1, -1)
    order = (end - begin).argsort(descending=True, stable=True)
    plan.item_count[0] = total
    plan.items[:total] = torch.stack((request, begin, end, slot), dim=1)[order].to(torch.int32)
    slots = torch.where(counts > 1, counts, 0)
    plan.merge_starts[1:] = slots.cumsum(0).to(torch.int32)
    plan.merge_slots[:] = torch.arange(room, dtype=torch.int32)
    return plan


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    out: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """`torch.ops.warmroute.decode` with a plan, (partial, partial_lse) and scales of K and V."""
    torch.ops.warmroute.decode(
        *(q, k_pages, v_pages, page_table, *plan[1:], float(scale), out, *workspace, *scales)
    )


def decode_on_cpu(
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
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """In float64 where q is, else in float32. Takes a request's length from its items."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_tokens, kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    lengths = torch.zeros(len(q), dtype=torch.int64)
    for request, _, end, _ in items[: int(item_count)].tolist():
        lengths[request] = max(int(lengths[request]), end)
    for request, length in enumerate(lengths.tolist()):
        pages = page_table[request, : -(-length // page_tokens)].long()
        k, v = (
            x[:length] for x in tokens_of((k_pages, v_pages), (k_scales, v_scales), pages, wide)
        )
        query = q[request].to(wide).view(kv_heads, group, -1) * scale
        weights = torch.einsum("hgd,thd->hgt", query, k).softmax(-1)
        out[request] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1).to(out.dtype)


define("decode", decode_on_cpu, ("out", "partial", "partial_lse"))
