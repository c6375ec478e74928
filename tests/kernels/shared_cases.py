"""Makes steps of requests with common prefixes: their page tables, and a pool filled for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvkernels.ops.calibration import ALWAYS, NEVER
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import Step, plan_shared, workspace_of
from tests.kernels.emulated import poisoned, pool_of
from tests.kernels.quantized import as_numbers, quantized_pages


class Request(NamedTuple):
    """A request that shares whole pages with all requests whose names begin alike, and has `own`
    tokens after them.
    """

    names: str  # one letter a page
    own: int


class Tables(NamedTuple):
    context_tokens: torch.Tensor
    page_table: torch.Tensor
    pages: int
    filled: dict[int, int]  # tokens of each page in use


def tables(requests: list[Request], page_tokens: int, seed: int = 0) -> Tables:
    """Return page tables with scattered pages; entries that belong to no request are far out of
    range.
    """
    lengths = [len(one.names) * page_tokens + one.own for one in requests]
    counts = [-(-length // page_tokens) for length in lengths]
    pages = sum(counts) + 3
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    page_table = torch.full((len(requests), max([*counts, 1]) + 1), 1 << 30, dtype=torch.int32)
    known: dict[str, int] = {}
    filled: dict[int, int] = {}
    for row, (one, length, count) in enumerate(zip(requests, lengths, counts, strict=True)):
        for number in range(count):
            name = one.names[: number + 1] if number < len(one.names) else f"{row} {number}"
            page = known.setdefault(name, len(known))
            page_table[row, number] = free[page]
            filled[free[page]] = min(page_tokens, length - number * page_tokens)
    return Tables(torch.tensor(lengths, dtype=torch.int64), page_table, pages, filled)


class Case(NamedTuple):
    """The arguments of one call of `shared_decode` in their order."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    item_count: torch.Tensor
    items: torch.Tensor
    members: torch.Tensor
    merge_starts: torch.Tensor
    merge_slots: torch.Tensor
    scale: float
    out: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


def case(
    requests: list[Request],
    group: int = 4,
    kv_heads: int = 1,
    dim: int = 64,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    costs: Costs = ALWAYS,
    room: tuple[int, int] | None = None,
) -> tuple[Case, Step, torch.Tensor]:
    """Return a call with random values and NaN wherever there is no token, the step that it
    computes, and the number of context tokens of each request.
    """
    draw = torch.Generator().manual_seed(seed)
    made = tables(requests, page_tokens, seed)
    k_pages, v_pages = pool_of(made.pages, kv_heads, page_tokens, dim, dtype)
    for page, tokens in made.filled.items():
        for kept in (k_pages, v_pages):
            kept[page, :tokens] = torch.randn(tokens, kv_heads, dim, generator=draw).to(dtype)
    shape = AttentionShape(group * kv_heads, kv_heads, dim)
    step = plan_shared(*made[:3], page_tokens, shape, costs, room)
    call = Case(
        torch.randn(len(requests), shape.heads, dim, generator=draw).to(dtype),
        *(k_pages, v_pages, made.page_table, *step.plan[1:], dim**-0.5),
        poisoned(len(requests), shape.heads, dim, dtype=dtype),
        *(part.fill_(float("nan")) for part in workspace_of(step.plan, shape.heads, dim)),
    )
    return call, step, made.context_tokens


def alone(
    lengths: list[int],
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    room: tuple[int, int] | None = None,
) -> Case:
    """Return a call for requests of `lengths` tokens that share nothing."""
    requests = [Request("", length) for length in lengths]
    return case(requests, group, kv_heads, dim, page_tokens, dtype, seed, NEVER, room)[0]


def exact(made: Case, context_tokens: torch.Tensor) -> torch.Tensor:
    """Return the output in float64, computed for each request by itself without plan or
    operator.
    """
    page_tokens, kv_heads = made.k_pages.shape[1:3]
    out = torch.zeros_like(made.q, dtype=torch.float64)
    k_pages = as_numbers(made.k_pages, made.k_scales)
    v_pages = as_numbers(made.v_pages, made.v_scales)
    for row, length in enumerate(context_tokens.tolist()):
        pages = made.page_table[row, : -(-length // page_tokens)].long()
        k, v = (x[pages].flatten(0, 1)[:length] for x in (k_pages, v_pages))
        asked = made.q[row].double().view(kv_heads, -1, made.q.shape[2]) * made.scale
        weights = torch.einsum("hgd,thd->hgt", asked, k).softmax(-1)
        out[row] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1)
    return out


def quantized(plain: Case, stored: torch.dtype) -> Case:
    """Return `plain` with its pages quantized to `stored`."""
    return plain._replace(**quantized_pages(plain.k_pages, plain.v_pages, stored))


def arguments(made: Case, **changed: Any) -> list[Any]:
    return list(made._replace(**changed))
