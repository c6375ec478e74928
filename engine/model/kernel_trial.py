"""Runs each kernel once on a small case when a worker starts, and compares the result with that of
the operator on the CPU.

So a device or driver that cannot run a kernel, or computes wrong numbers, is reported before the
first request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.attention import attend, write
from engine.model.batch import Piece, flat_batch, is_cuda
from engine.model.kernel_attention import FlashInfer
from engine.model.kv_cache import LayerKv
from kvkernels.cuda.library import RefusedError
from kvkernels.ops import append as _append  # noqa: F401 - defines the operator
from kvkernels.ops.calibration import ALWAYS, NEVER
from kvkernels.ops.prefill import plan_prefill, prefill_on_cpu
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import (
    SharedPlan,
    plan_shared,
    shared_decode_on_cpu,
    workspace_of,
)
from kvkernels.ops.w8a16 import w8a16_on_cpu

# ||got - wanted|| / ||wanted|| of a row: products of 16 bits, and the rounding of a cache.
MOST_ERROR = 2e-2
MOST_ROUNDED = 6e-2
LONG = 700  # context tokens: several pieces of keys, several items of decode
WAY = "WARMROUTE_PREFILL"
HOPPER = (9, 0)

log = logging.getLogger(__name__)

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
Kept = tuple[torch.Tensor, torch.Tensor, Scales]
Operator = Callable[..., None]  # its name, then its arguments


def on_device(name: str, *arguments: object) -> None:
    """Call the operator called `name`, which uses the kernels if its tensors are on a GPU."""
    getattr(torch.ops.warmroute, name)(*arguments)


def _by_torch(name: str, *arguments: Any) -> None:
    """Do what the operator `append` does without norms and rotation, in plain torch."""
    _, k, v, _, _, _, slots, *_ = arguments
    write(k, v, LayerKv(*arguments[-4:]), slots)


def row_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of any row of `got` [rows, ...] against `wanted`; NaN if a row has a
    NaN.
    """
    got, wanted = got.cpu().flatten(1).double(), wanted.flatten(1).double()
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@dataclass(frozen=True, slots=True)
class AttentionTrial:
    """A trial of the attention kernels with these heads, over a cache that stores K and V as
    `stored`. Lifetime: call.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def is_quantized(self) -> bool:
        """True if pages have scales."""
        return self.stored != self.dtype

    def first_fault(self, run: Operator, device: str) -> str:
        """Return the first kernel that fails, and how; "" if all kernels are right. If the prefill
        kernel for Hopper fails, it is turned off by name, and the kernel for other GPUs is tried.
        """
        try:
            return self._tried(run, device)
        except (RefusedError, RuntimeError) as error:
            return f"a trial: {error!s:.300}"

    def flashinfer_fault(self, device: str) -> str:
        """Return the reason why FlashInfer cannot be used for decodes and prefill chunks; "" if its
        numbers are right.
        """
        blocks = self._table().tolist()
        pieces = [Piece([0], LONG - 1, blocks), Piece([0], 4, blocks)]
        pieces += [Piece([0] * 40, LONG - 40, blocks), Piece([0] * 90, 0, blocks)]
        laid_out = flat_batch(pieces, self.page_tokens)
        q = self._tokens()[0][: len(laid_out.token_ids)]
        out = torch.full_like(q, float("nan")).to(device)
        try:
            k, v, _ = self._pages(_by_torch, device)
            batch, parts = laid_out.on(device), FlashInfer()
            for kind, requests in (("decode", range(2)), ("prefill", range(2, 4))):
                parts.part(kind, batch, requests)(q.to(device), LayerKv(k, v), out)
            wide = LayerKv(k.cpu().double(), v.cpu().double())
            error = row_error(out, attend(q.double(), wide, laid_out))
        except Exception as why:  # noqa: BLE001 - its compilers' are of no common kind
            return f"a trial: {why!s:.300}"
        return "" if error < MOST_ERROR else f"a trial: FlashInfer is {error:.1e} off"

    def _tried(self, run: Operator, device: str) -> str:
        k, v, scales = self._pages(run, device)
        worst = [("append", self._append_error(k, v, scales), MOST_ROUNDED)]
        try:
            found = self._prefill_error(run, device, (k, v, scales))
        except RuntimeError as error:  # not a refusal: those are of every kernel
            found, told = float("nan"), f"{error!s:.200}"
        else:
            told = f"{found:.1e} off"
        is_hopper = is_cuda(device) and torch.cuda.get_device_capability(device) == HOPPER
        if not found < MOST_ERROR and is_hopper and WAY not in os.environ:
            log.warning("prefill: mma instead of wgmma, because a trial was %s", told)
            os.environ[WAY] = "mma"
            found = self._prefill_error(run, device, (k, v, scales))
        worst.append(("prefill", found, MOST_ERROR))
        worst.append(("shared_decode", self._decode_error(run, device, (k, v, scales)), MOST_ERROR))
        for name, far, most in worst:
            if not far < most:
                return f"a trial: {name} is {far:.1e} off, {most:g} would be right"
        return ""

    def _random(self, *shape: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=draw).to(self.dtype)

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of LONG tokens as a model projects them, before norms and rotation."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (self._random(LONG + n, count, self.head_dim) for n, count in enumerate(heads))
        return q[:LONG], k[:LONG], v[:LONG]

    @property
    def _page_count(self) -> int:
        return -(-LONG // self.page_tokens)

    def _pages(self, run: Operator, device: str) -> tuple[torch.Tensor, torch.Tensor, Scales]:
        """Return K, V and the scales of a cache to which `append` has written LONG tokens without
        rotation, from the last page on backwards; the other pages are NaN.
        """
        shape = (self._page_count + 1, self.kv_heads, 2, self.page_tokens, self.head_dim)
        scales: Scales = (None, None)
        if not self.is_quantized:
            pool = torch.full(shape, float("nan"), dtype=self.stored, device=device)
        else:
            pool = torch.zeros(shape, dtype=torch.int8, device=device).view(self.stored)
            factors = torch.full(shape[:-1], float("nan"), device=device)
            scales = factors[:, :, 0].transpose(1, 2), factors[:, :, 1].transpose(1, 2)
        k, v = pool[:, :, 0].transpose(1, 2), pool[:, :, 1].transpose(1, 2)
        given = [x.to(device) for x in self._tokens()]
        positions = torch.arange(LONG, device=device)
        slots = self._slots().to(device)
        flat = torch.ones(1, self.head_dim // 2, device=device)
        turn = (flat, flat * 0, positions * 0, slots)
        run("append", *given, *turn, None, None, 0.0, torch.empty_like(given[0]), k, v, *scales)
        return k, v, scales

    def _table(self) -> torch.Tensor:
        return torch.arange(self._page_count, 0, -1, dtype=torch.int32)

    def _slots(self) -> torch.Tensor:
        at = torch.arange(LONG)
        pages = self._table().long()[at // self.page_tokens]
        return pages * self.page_tokens + at % self.page_tokens

    def _append_error(self, k: torch.Tensor, v: torch.Tensor, scales: Scales) -> float:
        """Return the error of K and V as they were stored."""
        at = self._slots()
        pages, tokens = at // self.page_tokens, at % self.page_tokens
        worst = 0.0
        for kept, factors, wanted in zip((k, v), scales, self._tokens()[1:], strict=True):
            got = kept.cpu().double()[pages, tokens]
            if factors is not None:
                got = got * factors.cpu().double()[pages, tokens][..., None]
            worst = max(worst, row_error(got.flatten(0, 1), wanted.flatten(0, 1)), key=_or_nan)
        return worst

    def _prefill_error(self, run: Operator, device: str, kept: Kept) -> float:
        """Return the error of a prefill chunk whose keys are split, and of one without context."""
        k, v, scales = kept
        group, first = self.heads // self.kv_heads, 40
        spans = torch.tensor([[0, first, LONG], [first, 90, 90]])
        table = self._table().expand(2, -1).contiguous()
        sizes = len(spans), len(k), self.page_tokens, group
        plan = plan_prefill(spans, first + 90, table, *sizes[1:], kv_heads=self.kv_heads)
        q = self._tokens()[0][: first + 90]
        out = torch.full_like(q, float("nan")).to(device)
        scale = self.head_dim**-0.5
        moved = plan.on(device)
        parts = workspace_of(plan, self.heads, self.head_dim, device)
        given = (q.to(device), k, v, table.to(device), *moved[1:], scale, out, None)
        run("prefill", *given, *parts, *scales)
        wanted = torch.empty_like(q, dtype=torch.float64)
        parts = workspace_of(plan, self.heads, self.head_dim)
        pages, factors = _on_cpu(kept)
        given = (q.double(), *pages, table, *plan[1:], scale, wanted, None)
        prefill_on_cpu(*given, *parts, *factors)
        return row_error(out, wanted)

    def _decode_error(self, run: Operator, device: str, kept: Kept) -> float:
        """Return the error of decodes that share nothing, and of decodes so many that the kernel
        for many rows is used.
        """
        k, v, scales = kept
        requests = 17 // (self.heads // self.kv_heads) + 2
        context = torch.full((requests,), LONG)
        table = self._table().expand(requests, -1).contiguous()
        q, scale = self._tokens()[0][:requests], self.head_dim**-0.5
        worst = 0.0
        for costs in (NEVER, ALWAYS):
            plan, wanted = self._decoded(q, context, table, costs, kept)
            out = torch.full_like(q, float("nan")).to(device)
            parts = workspace_of(plan, self.heads, self.head_dim, device)
            given = (q.to(device), k, v, table.to(device), *plan.on(device)[1:], scale, out)
            run("shared_decode", *given, *parts, *scales)
            worst = max(worst, row_error(out, wanted), key=_or_nan)
        return worst

    def _decoded(
        self, q: torch.Tensor, context: torch.Tensor, table: torch.Tensor, costs: Costs, kept: Kept
    ) -> tuple[SharedPlan, torch.Tensor]:
        """Return a plan, and the correct result of a decode with it, in float64."""
        shape = AttentionShape(self.heads, self.kv_heads, self.head_dim)
        plan = plan_shared(context, table, len(kept[0]), self.page_tokens, shape, costs).plan
        wanted = torch.empty_like(q, dtype=torch.float64)
        pages, factors = _on_cpu(kept)
        given = (q.double(), *pages, table, *plan[1:], self.head_dim**-0.5, wanted)
        shared_decode_on_cpu(*given, *workspace_of(plan, 0, 0), *factors)
        return plan, wanted


def _or_nan(error: float) -> tuple[bool, float]:
    return error != error, error


def _on_cpu(kept: Kept) -> tuple[tuple[torch.Tensor, torch.Tensor], Scales]:
    k, v, (first, second) = kept
    factors = None if first is None else first.cpu(), None if second is None else second.cpu()
    return (k.cpu(), v.cpu()), factors


def int8_fault(dtype: torch.dtype, most_rows: int, run: Operator, device: str) -> str:
    """Return the reason why the kernel for INT8 weights cannot be used; "" if it is right for one
    row and for many.
    """
    draw = torch.Generator().manual_seed(1)
    q = torch.randint(-127, 128, (96, 256), generator=draw, dtype=torch.int8)
    scales = torch.rand(96, generator=draw) / 1000
    try:
        for rows in (1, most_rows):
            x = torch.randn(rows, 256, generator=draw).to(dtype)
            out = torch.full((rows, 96), float("nan"), dtype=dtype, device=device)
            run("w8a16", x.to(device), q.to(device), scales.to(device), out)
            wanted = torch.empty(rows, 96, dtype=torch.float64)
            w8a16_on_cpu(x.double(), q, scales, wanted)
            if not (error := row_error(out, wanted)) < MOST_ERROR:
                return f"a trial: w8a16 of {rows} rows is {error:.1e} off"
    except (RefusedError, RuntimeError) as error:
        return f"a trial: {error!s:.300}"
    return ""
