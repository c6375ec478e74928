"""Prefill: causal attention of many query tokens a request. Kernel: `cuda/prefill.cuh`.

`torch.ops.warmroute.prefill(q, k_pages, v_pages, page_table, item_count, items, scale, out, lse,
k_scales, v_scales)`:

    q, out              [tokens, heads, head_dim]
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn,
                        with equal strides
    page_table          int32[requests, pages]
    item_count, items   the plan of `prefill_plan.py`, made for this step
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

import torch

from kvkernels.ops.kept_pages import numbers
from kvkernels.ops.operator import define
from kvkernels.ops.prefill_plan import ROWS, PrefillPlan
from kvkernels.ops.shapes import unsupported_shape

SCHEMA = (
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor item_count, "
    "Tensor items, float scale, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor? k_scales, Tensor? v_scales) -> ()"
)


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
        k, v = (
            numbers(x, scales, pages, wide).flatten(0, 1)[:end]
            for x, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        rows = slice(first, first + tokens)
        asked = q[rows].to(wide).view(tokens, kv_heads, group, -1) * scale
        seen = torch.arange(end) <= position + torch.arange(tokens)[:, None]
        scores = torch.einsum("nhgd,thd->nhgt", asked, k)
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        mixed = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v)
        out[rows] = mixed.flatten(1, 2).to(out.dtype)
        if lse is not None:
            sums = scores.logsumexp(-1) / math.log(2)
            lse[rows] = sums.flatten(1, 2).to(lse.dtype)


define("prefill", SCHEMA, prefill_on_cpu)
