"""Shared decode: decode whose requests read equal pages once. Kernel: `cuda/shared_decode.cuh`.

`torch.ops.warmroute.shared_decode(q, k_pages, v_pages, page_table, item_count, items, members,
merge_starts, merge_slots, scale, out, partial, partial_lse, k_scales, v_scales)`: arguments and
what CUDA takes are those of `decode.py`, but for the plan, which is that of `shared_plan.py`.
"""

from __future__ import annotations

import torch

from kvkernels.ops.kept_pages import numbers
from kvkernels.ops.operator import define
from kvkernels.ops.shared_plan import SharedPlan

SCHEMA = (
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor item_count, "
    "Tensor items, Tensor members, Tensor merge_starts, Tensor merge_slots, float scale, "
    "Tensor(a!) out, Tensor(b!) partial, Tensor(c!) partial_lse, "
    "Tensor? k_scales, Tensor? v_scales) -> ()"
)


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
    """`torch.ops.warmroute.shared_decode` with a plan, (partial, partial_lse), which
    `decode.workspace_of` makes for this plan, too, and scales of K and V."""
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
    """In float64 where q is, else in float32. Follows the plan's items: keys of the first member
    for all of them, softmax over all that a request's items gave."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_tokens, kv_heads = k_pages.shape[1:3]
    scores: list[list[torch.Tensor]] = [[] for _ in q]
    values: list[list[torch.Tensor]] = [[] for _ in q]
    for first, requests, begin, end, *_ in items[: int(item_count)].tolist():
        own = members[first : first + requests].tolist()
        # Items begin with a tile, not with a page.
        whole = slice(begin // page_tokens, -(-end // page_tokens))
        pages, skipped = page_table[own[0], whole].long(), begin // page_tokens * page_tokens
        k, v = (
            numbers(x, scales, pages, wide).flatten(0, 1)[begin - skipped : end - skipped]
            for x, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        for request in own:
            asked = q[request].to(wide).view(kv_heads, -1, q.shape[2]) * scale
            scores[request].append(torch.einsum("hgd,thd->hgt", asked, k))
            values[request].append(v)
    for request in range(len(q)):
        weights = torch.cat(scores[request], dim=-1).softmax(-1)
        mixed = torch.einsum("hgt,thd->hgd", weights, torch.cat(values[request]))
        out[request] = mixed.flatten(0, 1).to(out.dtype)


define("shared_decode", SCHEMA, shared_decode_on_cpu)
