"""Makes calls of the operator `prefill` for tests, with pages poisoned wherever there is no token,
and checks their results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import kvkernels.ops.prefill as _  # noqa: F401  (defines the operator)
from kvkernels.ops.prefill import PrefillPlan, plan_prefill
from tests.kernels.emulated import NAN, emulate, poisoned, pool_of, relative_error
from tests.kernels.quantized import as_numbers, quantized_pages

BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
LSE_BOUND = 2e-3


@dataclass
class Case:
    """The arguments of one call of `prefill` in their order."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    item_count: torch.Tensor
    items: torch.Tensor
    merge_starts: torch.Tensor
    merge_slots: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor | None
    partial: torch.Tensor
    partial_lse: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def arguments(self) -> list[Any]:
        return list(vars(self).values())


def case(
    pieces: list[tuple[int, int]],
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    room: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
    is_cut: bool = False,
) -> Case:
    """Return a call for requests of (tokens before, new tokens) on scattered pages, with an unused
    row between any two. With `is_cut`, the keys are cut into pieces, as for a launch of one KV head
    that would have few items.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-(start + tokens) // page_tokens) for start, tokens in pieces]
    pages = sum(counts) + 3
    k_pages, v_pages = pool_of(pages, kv_heads, page_tokens, dim, dtype)
    free = torch.randperm(pages, generator=draw).tolist()
    table = torch.full((len(pieces), max(counts) + 1), 1 << 30, dtype=torch.int32)
    spans, rows = [], 1
    for row, ((start, tokens), count) in enumerate(zip(pieces, counts, strict=True)):
        spans.append((rows, tokens, start + tokens))
        rows += tokens + 1
        for number in range(count):
            page = table[row, number] = free.pop()
            there = min(page_tokens, start + tokens - number * page_tokens)
            for kept in (k_pages, v_pages):
                kept[page, :there] = torch.randn(there, kv_heads, dim, generator=draw).to(dtype)
    few = 1 if is_cut else None
    sizes = pages, page_tokens, group, room
    plan = plan_prefill(torch.tensor(spans), rows, table, *sizes, kv_heads=few)
    heads = kv_heads * group
    q = poisoned(rows, heads, dim, dtype=dtype)
    for first, tokens, _context in spans:
        q[first : first + tokens] = torch.randn(tokens, heads, dim, generator=draw).to(dtype)
    return Case(
        *(q, k_pages, v_pages, table, *plan[1:], scale * dim**-0.5),
        poisoned(rows, heads, dim, dtype=dtype),
        torch.full((rows, heads), NAN),
        *pieces_of(plan, heads, dim),
    )


def pieces_of(plan: PrefillPlan, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a poisoned workspace for the partial results of the plan."""
    slots = len(plan.merge_slots)
    return poisoned(slots, heads, dim, dtype=torch.float32), torch.full((slots, heads), NAN)


def exact(made: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in float64, computed by the CPU implementation."""
    q, lse = made.q.double(), torch.full(made.q.shape[:2], NAN).double()
    wide = replace(
        made,
        q=q,
        k_pages=as_numbers(made.k_pages, made.k_scales),
        v_pages=as_numbers(made.v_pages, made.v_scales),
        out=torch.full_like(q, NAN),
        lse=lse,
        k_scales=None,
        v_scales=None,
    )
    torch.ops.warmroute.prefill(*wide.arguments())
    return wide.out, lse


def quantized(plain: Case, stored: torch.dtype) -> Case:
    """Return `plain` with its pages quantized to `stored`."""
    return replace(plain, **quantized_pages(plain.k_pages, plain.v_pages, stored))


def check_result(made: Case, seed: int = 1, bound: float | None = None, run: Any = emulate) -> None:
    """Assert that every row with a work item is near float64 and that `run` leaves every other row
    alone.
    """
    if run is emulate:
        emulate("prefill", *made.arguments(), seed=seed)
    else:
        run(*made.arguments())
    wanted, sums = exact(made)
    there = ~sums.isnan()
    assert made.out[~there].isnan().all(), "written where no item is"
    for got, row in zip(made.out[there], wanted[there], strict=True):
        assert relative_error(got, row) < (bound or BOUND[made.q.dtype])
    if made.lse is not None:
        assert torch.equal(made.lse.isnan(), ~there)
        assert float((made.lse[there] - sums[there]).abs().max()) < LSE_BOUND
