"""Our kernels on a GPU: for a case, inputs to use in turn, what runs them, and their error.

Pages lie scattered, what no request has is NaN, and so are outputs before they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from kvkernels.ops import append as append_op
from kvkernels.ops import prefill as prefill_op
from kvkernels.ops import relayout as copy_op
from kvkernels.ops import w8a16 as w8a16_op
from kvkernels.ops.operator import cuda_library
from kvkernels.ops.prefill import plan_prefill
from kvkernels.ops.relayout import moves, plan
from kvkernels.ops.shared_costs import AttentionShape
from kvkernels.ops.shared_decode import plan_shared, shared_decode, workspace_of
from tests.bench.gpu.cases import Attention, Blocks, Linear
from tests.bench.gpu.timing import Run
from tests.oracles.decode import decode, decode_on_cpu, plan_decode

BF16 = torch.bfloat16
CHECKED = 2  # requests compared with float64, which takes its time


@dataclass
class Batch:
    """Inputs of one attention case on the device; K and V are [page, token, kv head, dim]."""

    shape: Attention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    table: torch.Tensor  # int32[requests, pages]
    out: torch.Tensor

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||."""
    return float((got.double() - wanted).norm() / wanted.norm())


def table_of(shape: Attention, draw: torch.Generator) -> torch.Tensor:
    """Scattered pages, those of the prefix the same for all. On the CPU."""
    common, each = shape.prefix // shape.page, ceil(shape.context / shape.page)
    free = torch.randperm(shape.pages, generator=draw).to(torch.int32)
    own = free[common:].view(shape.requests, each - common)
    return torch.cat((free[:common].expand(shape.requests, -1), own), dim=1)


def batch_of(shape: Attention, seed: int, device: str = "cuda") -> Batch:
    """Random numbers in the engine's order of axes, in a pool with a page more than is used."""
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
        if stored != torch.int8:  # bytes of any exponent up to 240, none of them NaN
            kept = torch.where((kept & 0x7F) < 0x78, kept, 0).view(stored)
        last = scales = torch.rand(pool[:-1], device=device) / 100 + 0.001
    beyond = shape.context % shape.page
    last[shape.pages] = float("nan")
    if beyond:  # tokens after a request's last one
        last[table[:, -1].long().to(device), :, :, beyond:] = float("nan")
    views = [kept[:, :, kv].transpose(1, 2) for kv in (0, 1)]
    of_scales = [None if scales is None else scales[:, :, kv].transpose(1, 2) for kv in (0, 1)]
    rows = (shape.requests * shape.new, shape.heads, shape.dim)
    return Batch(
        shape,
        torch.randn(rows, device=device, dtype=BF16),
        *(views[0], views[1], of_scales[0], of_scales[1], table.to(device)),
        torch.full(rows, float("nan"), device=device, dtype=BF16),
    )


def decode_run(batch: Batch) -> Run:
    shape, device = batch.shape, batch.q.device
    lengths = torch.full((shape.requests,), shape.context)
    made = plan_decode(lengths, batch.table.cpu(), len(batch.k), shape.page).on(device)
    workspace = workspace_of(made, shape.heads, shape.dim, device)
    scales = (batch.k_scales, batch.v_scales)
    return lambda: decode(
        *(batch.q, batch.k, batch.v, batch.table, made, batch.scale, batch.out, workspace, scales)
    )


def shared_run(batch: Batch) -> Run:
    """As the default costs plan it, the host's part left out as for `decode_run`."""
    shape, device = batch.shape, batch.q.device
    lengths = torch.full((shape.requests,), shape.context)
    kept = (2, 1, 0) if shape.stored == "bfloat16" else (1, 1, 4)
    heads = AttentionShape(shape.heads, shape.kv_heads, shape.dim, *kept)
    made = plan_shared(lengths, batch.table.cpu(), len(batch.k), shape.page, heads).plan.on(device)
    workspace = workspace_of(made, shape.heads, shape.dim, device)
    scales = (batch.k_scales, batch.v_scales)
    return lambda: shared_decode(
        *(batch.q, batch.k, batch.v, batch.table, made, batch.scale, batch.out, workspace, scales)
    )


def decode_error(batch: Batch) -> float:
    """Of the first requests, after a run."""
    shape, few = batch.shape, min(CHECKED, batch.shape.requests)
    table = batch.table[:few]
    made = plan_decode(torch.full((few,), shape.context), table.cpu(), len(batch.k), shape.page)
    wanted = torch.empty_like(batch.q[:few], dtype=torch.float64)
    parts = (torch.empty(0), torch.empty(0))
    decode_on_cpu(
        *(batch.q[:few].double(), batch.k, batch.v, table, *made[1:], batch.scale, wanted),
        *(*parts, batch.k_scales, batch.v_scales),
    )
    return error_of(batch.out[:few], wanted)


PREFILL_WAYS = ("mma", "wgmma")


def prefill_run(batch: Batch, way: str = "") -> Run:
    """By the device's kernel, or by the one of `PREFILL_WAYS`."""
    shape, device = batch.shape, batch.q.device
    spans = torch.tensor([[n * shape.new, shape.new, shape.context] for n in range(shape.requests)])
    group = shape.heads // shape.kv_heads
    made = plan_prefill(spans, len(batch.q), batch.table.cpu(), len(batch.k), shape.page, group).on(
        device
    )
    given = batch.q, batch.k, batch.v, batch.table
    scales = (batch.k_scales, batch.v_scales)
    if not way:
        return lambda: prefill_op.prefill(*given, made, batch.scale, batch.out, scales=scales)
    arguments = (*given, *made[1:], batch.scale, batch.out, None, *scales)
    return lambda: cuda_library().call(
        f"prefill_{way}", arguments, torch.cuda.current_stream().cuda_stream
    )


def prefill_error(batch: Batch) -> float:
    """Of the last query of the first requests, after a run: what decode would give it."""
    last = [batch.shape.new * (n + 1) - 1 for n in range(min(CHECKED, batch.shape.requests))]
    ends = Batch(**{**vars(batch), "q": batch.q[last], "out": batch.out[last]})
    return decode_error(ends)


def append_run(shape: Attention, seed: int, device: str = "cuda") -> tuple[Run, float]:
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

    run()
    wide = [torch.zeros_like(x, dtype=torch.float64) for x in kept]
    append_op.append_on_cpu(*(x.double() for x in (batch.q, k, v)), *given, *wide, None, None)
    at = (slots // shape.page, slots % shape.page)
    errors = [error_of(batch.out, wide[0])]
    errors += [error_of(x[at], w[at]) for x, w in zip(kept[1:], wide[1:], strict=True)]
    return run, max(errors, key=lambda error: (error != error, error))


def linear_run(shape: Linear, seed: int, device: str = "cuda") -> tuple[Run, float]:
    torch.manual_seed(seed)
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=BF16)
    q = torch.randint(-127, 128, (shape.channels, shape.inputs), device=device, dtype=torch.int8)
    scales = torch.rand(shape.channels, device=device) / 1000
    out = torch.full((shape.rows, shape.channels), float("nan"), device=device, dtype=BF16)

    def run() -> None:
        torch.ops.warmroute.w8a16(x, q, scales, out)

    run()
    wanted = torch.empty_like(out, dtype=torch.float64)
    w8a16_op.w8a16_on_cpu(x.double(), q, scales, wanted)
    return run, error_of(out, wanted)


def copy_run(shape: Blocks, seed: int, device: str = "cuda") -> tuple[Run, float]:
    """The error is the share of sampled bytes that are not where the CPU's copy puts them."""
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

    run()
    wanted = torch.zeros_like(into, device="cpu")
    copy_op.copy_runs_on_cpu(pool.cpu(), wanted, made.runs, at[:: max(1, len(at) // 8)])
    there = wanted != 0
    return run, float((into.cpu()[there] != wanted[there]).double().mean())
