"""Runs our kernels on a case: inputs to use in turn, launches, and the errors of every row.

Pages are scattered; pages that no request has, and outputs before they are written, are NaN. On a
CPU the same runs use the operators' plain implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from kvkernels.ops import append as append_op
from kvkernels.ops import prefill as prefill_op
from kvkernels.ops import relayout as copy_op
from kvkernels.ops import w8a16 as w8a16_op
from kvkernels.ops.calibration import NEVER
from kvkernels.ops.operator import cuda_library
from kvkernels.ops.prefill import plan_prefill
from kvkernels.ops.relayout import moves, plan
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import (
    SharedPlan,
    plan_shared,
    shared_decode,
    shared_decode_on_cpu,
    workspace_of,
)
from tests.bench.gpu.cases import Attention, Blocks, Case, Linear
from tests.bench.gpu.timing import Run

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass
class Batch:
    """The inputs of one attention case on the device; K and V have the shape [page, token, kv head,
    dim].
    """

    shape: Attention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    table: torch.Tensor  # int32[requests, pages]
    out: torch.Tensor
    lse: torch.Tensor  # float32[rows, heads]; prefill's

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


class Errors(NamedTuple):
    """The worst errors over all rows: ||got - wanted|| / ||wanted|| of outputs, and |got - wanted|
    of base-2 log-sum-exps (0 if there are none). An error is NaN if a row has a NaN.
    """

    row: float
    lse: float = 0.0


class Made(NamedTuple):
    """A case on one input: a function that launches it, and one that returns its errors against
    float64, computed on `oracle_on` (the device itself by default).
    """

    run: Run
    errors: Callable[..., Errors]


def worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the greatest relative error of the rows [rows, ...]."""
    got, wanted = (x.flatten(1).double().to(wanted.device) for x in (got, wanted))
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def table_of(shape: Attention, draw: torch.Generator) -> torch.Tensor:
    """Return a page table on the CPU with scattered pages, those of the prefix the same for all
    requests.
    """
    common, each = shape.prefix // shape.page, ceil(shape.context / shape.page)
    free = torch.randperm(shape.pages, generator=draw).to(torch.int32)
    own = free[common:].view(shape.requests, each - common)
    return torch.cat((free[:common].expand(shape.requests, -1), own), dim=1)


def batch_of(shape: Attention, seed: int, device: str = "cuda") -> Batch:
    """Return random inputs in the engine's order of axes, in a pool with one page more than is
    used.
    """
    draw = torch.Generator().manual_seed(seed)
    table = table_of(shape, draw)
    torch.manual_seed(seed)
    pool = (shape.pages + 1, shape.kv_heads, 2, shape.page, shape.dim)
    scales = None
    if shape.stored == "bfloat16":
        kept = torch.randn(pool, device=device, dtype=BF16)
        last = kept
    else:
        stored = getattr(torch, shape.stored)
        kept = torch.randint(-127, 128, pool, device=device, dtype=torch.int8)
        if stored != torch.int8:  # bytes of any exponent up to 240, without NaN
            kept = torch.where((kept & 0x7F) < 0x78, kept, 0).view(stored)
        last = scales = torch.rand(pool[:-1], device=device) / 100 + 0.001
    beyond = shape.context % shape.page
    last[shape.pages] = float("nan")
    if beyond:  # tokens after the last one of a request
        last[table[:, -1].long().to(device), :, :, beyond:] = float("nan")
    views = [kept[:, :, kv].transpose(1, 2) for kv in (0, 1)]
    of_scales = [None if scales is None else scales[:, :, kv].transpose(1, 2) for kv in (0, 1)]
    rows = (shape.requests * shape.new, shape.heads, shape.dim)
    return Batch(
        shape,
        torch.randn(rows, device=device, dtype=BF16),
        *(views[0], views[1], of_scales[0], of_scales[1], table.to(device)),
        torch.full(rows, NAN, device=device, dtype=BF16),
        torch.full(rows[:2], NAN, device=device),
    )


def lengths_of(shape: Attention) -> torch.Tensor:
    return torch.full((shape.requests,), shape.context)


def decode_plan(batch: Batch, costs: Costs) -> SharedPlan:
    """Return the plan of a decode step on the host for these costs."""
    shape = batch.shape
    kept = (2, 1, 0) if shape.stored == "bfloat16" else (1, 1, 4)
    heads = AttentionShape(shape.heads, shape.kv_heads, shape.dim, *kept)
    sizes = len(batch.k), shape.page, heads
    return plan_shared(lengths_of(shape), batch.table.cpu(), *sizes, costs).plan


def decode_run(batch: Batch, costs: Costs) -> Run:
    """Return a function that launches a decode, without the host's planning, which is done once for
    all layers of a step.
    """
    shape, device = batch.shape, batch.q.device
    made = decode_plan(batch, costs).on(device)
    workspace = workspace_of(made, shape.heads, shape.dim, device)
    scales = (batch.k_scales, batch.v_scales)
    return lambda: shared_decode(
        *(batch.q, batch.k, batch.v, batch.table, made, batch.scale, batch.out, workspace, scales)
    )


def spans_of(shape: Attention) -> torch.Tensor:
    return torch.tensor([[n * shape.new, shape.new, shape.context] for n in range(shape.requests)])


def prefill_run(batch: Batch, way: str = "") -> Run:
    """Return a function that launches a prefill by the device's default kernel, or by the kernel
    `way`: mma or wgmma.
    """
    shape, device = batch.shape, batch.q.device
    group = shape.heads // shape.kv_heads
    sizes = len(batch.q), batch.table.cpu(), len(batch.k), shape.page, group
    made = plan_prefill(spans_of(shape), *sizes, kv_heads=shape.kv_heads).on(device)
    given = batch.q, batch.k, batch.v, batch.table
    workspace = workspace_of(made, shape.heads, shape.dim, device)
    scales = (batch.k_scales, batch.v_scales)
    ends = batch.scale, batch.out, batch.lse, *workspace, *scales
    arguments = (*given, *made[1:], *ends)
    if not way:
        return lambda: torch.ops.warmroute.prefill(*arguments)
    return lambda: cuda_library().call(
        f"prefill_{way}", arguments, torch.cuda.current_stream().cuda_stream
    )


def attention_errors(batch: Batch, oracle_on: str = "") -> Errors:
    """Return the errors of every output row and, for prefill, of every log-sum-exp."""
    if oracle_on:
        moved = {
            name: x.to(oracle_on) if isinstance(x, torch.Tensor) else x
            for name, x in vars(batch).items()
        }
        batch = Batch(**moved)
    shape, table = batch.shape, batch.table
    out = torch.empty_like(batch.q, dtype=torch.float64)
    lse = torch.empty_like(batch.lse, dtype=torch.float64)
    pages = (batch.q.double(), batch.k, batch.v, table)
    scales = (batch.k_scales, batch.v_scales)
    if shape.new == 1:
        made = decode_plan(batch, NEVER)
        parts = (torch.empty(0), torch.empty(0))
        shared_decode_on_cpu(*pages, *made[1:], batch.scale, out, *parts, *scales)
        return Errors(worst_row(batch.out, out))
    group = shape.heads // shape.kv_heads
    sizes = len(batch.q), table.cpu(), len(batch.k), shape.page, group
    cut = plan_prefill(spans_of(shape), *sizes)
    none = workspace_of(cut, shape.heads, shape.dim, batch.q.device)
    prefill_op.prefill_on_cpu(*pages, *cut[1:], batch.scale, out, lse, *none, *scales)
    off = float((batch.lse.double() - lse).abs().max())
    return Errors(worst_row(batch.out, out), off)


def attention_made(kernel: str, shape: Attention, seed: int, device: str) -> Made:
    """Prepare an attention case; `kernel` is decode (which shares nothing), shared, prefill,
    prefill_mma or prefill_wgmma.
    """
    batch = batch_of(shape, seed, device)
    operator, _, way = kernel.partition("_")
    if operator == "prefill":
        run = prefill_run(batch, way)
    else:
        run = decode_run(batch, Costs() if operator == "shared" else NEVER)
    return Made(run, lambda oracle_on="": attention_errors(batch, oracle_on))


def append_made(shape: Attention, seed: int, device: str) -> Made:
    batch = batch_of(shape, seed, device)
    k, v = (torch.randn_like(batch.q[:, : shape.kv_heads]) for _ in range(2))
    angles = torch.rand(shape.context, shape.dim // 2, device=device)
    positions = torch.arange(shape.context, device=device)
    slots = batch.table[0].long().repeat_interleave(shape.page)[: shape.context] * shape.page
    slots += positions % shape.page
    given = (angles.cos(), angles.sin(), positions, slots, None, None, 0.0)
    kept = (batch.out, batch.k, batch.v)

    def run() -> None:
        torch.ops.warmroute.append(batch.q, k, v, *given, *kept, None, None)

    def errors(oracle_on: str = "") -> Errors:
        on = oracle_on or device
        wide = [torch.zeros_like(x, dtype=torch.float64, device=on) for x in kept]
        read = (x.to(on) if isinstance(x, torch.Tensor) else x for x in given)
        exact = (x.double().to(on) for x in (batch.q, k, v))
        append_op.append_on_cpu(*exact, *read, *wide, None, None)
        at = (slots // shape.page, slots % shape.page)
        there = tuple(index.to(on) for index in at)
        pairs = [(batch.out, wide[0])]
        pairs += [(x[at], w[there]) for x, w in zip(kept[1:], wide[1:], strict=True)]
        return Errors(float(torch.tensor([worst_row(*pair) for pair in pairs]).max()))

    return Made(run, errors)


def linear_made(shape: Linear, seed: int, device: str) -> Made:
    torch.manual_seed(seed)
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=BF16)
    q = torch.randint(-127, 128, (shape.channels, shape.inputs), device=device, dtype=torch.int8)
    scales = torch.rand(shape.channels, device=device) / 1000
    out = torch.full((shape.rows, shape.channels), float("nan"), device=device, dtype=BF16)

    def run() -> None:
        torch.ops.warmroute.w8a16(x, q, scales, out)

    def errors(oracle_on: str = "") -> Errors:
        on = oracle_on or device
        wanted = torch.empty_like(out, dtype=torch.float64, device=on)
        w8a16_op.w8a16_on_cpu(x.double().to(on), q.to(on), scales.to(on), wanted)
        return Errors(worst_row(out, wanted))

    return Made(run, errors)


def copy_made(shape: Blocks, seed: int, device: str) -> Made:
    """Prepare a copy; its error is the share of sampled bytes that differ from the CPU's copy."""
    source = shape.layout(shape.heads, shape.page, shape.blocks)
    target = shape.layout(
        shape.target_heads, shape.target_page, shape.blocks * shape.page // shape.target_page
    )
    made = plan(source, target)
    ids = torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    at = moves(made, ids, range(target.blocks), range(shape.blocks * shape.page))
    pool, into = (
        torch.randint(1, 128, (layout.bytes,), device=device, dtype=torch.int8) * sign
        for layout, sign in ((source, 1), (target, 0))
    )
    runs, moved = made.runs.to(device), at.to(device)

    def run() -> None:
        torch.ops.warmroute.copy_runs(pool, into, runs, moved)

    def errors(oracle_on: str = "cpu") -> Errors:
        wanted = torch.zeros_like(into, device="cpu")
        copy_op.copy_runs_on_cpu(pool.cpu(), wanted, made.runs, at[:: max(1, len(at) // 8)])
        there = wanted != 0
        return Errors(float((into.cpu()[there] != wanted[there]).double().mean()))

    return Made(run, errors)


def made_of(case: Case, seed: int, device: str) -> Made:
    """Prepare the case on the input of this seed."""
    shape = case.shape
    if isinstance(shape, Linear):
        return linear_made(shape, seed, device)
    if isinstance(shape, Blocks):
        return copy_made(shape, seed, device)
    if case.kernel == "append":
        return append_made(shape, seed, device)
    return attention_made(case.kernel, shape, seed, device)
