"""Times shared decode by a plan: on a GPU by events, with nothing in its L2 cache that is read."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch

from engine.model.placed import is_cuda
from kvkernels.ops.calibration import PAGE
from kvkernels.ops.decode import workspace_of
from kvkernels.ops.shared_costs import AttentionShape
from kvkernels.ops.shared_decode import shared_decode
from kvkernels.ops.shared_plan import Step

FLUSH_BYTES = 256 << 20  # written before each run; several times an L2 cache


class DecodeTimer:
    """One layer's attention on `device`; numbers are random. Lifetime: one calibration."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: str) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._pool = self._random(0, shape.kv_heads, 2, PAGE, shape.head_dim)
        is_gpu = is_cuda(device)
        self._flushed = torch.empty(FLUSH_BYTES if is_gpu else 0, dtype=torch.uint8, device=device)

    def __call__(self, step: Step, page_table: torch.Tensor, pages: int) -> float:
        """Nanoseconds of one run by `step`'s plan over `pages` pages."""
        shape, device = self._shape, self._device
        if pages > len(self._pool):
            self._pool = self._random(pages, shape.kv_heads, 2, PAGE, shape.head_dim)
        k, v = (self._pool[:, :, kept].transpose(1, 2) for kept in (0, 1))
        q = self._random(len(page_table), shape.heads, shape.head_dim)
        out, table, plan = torch.empty_like(q), page_table.to(device), step.plan.on(device)
        workspace = workspace_of(plan, shape.heads, shape.head_dim, device)

        def run() -> None:
            shared_decode(q, k, v, table, plan, shape.head_dim**-0.5, out, workspace)

        return self._by_events(run) if is_cuda(device) else _by_clock(run)

    def _by_events(self, run: Callable[[], None]) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            self._flushed.zero_()  # takes longer than the launches, which so do not count
            begin.record()
            run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)


def _by_clock(run: Callable[[], None]) -> float:
    begun_ns = perf_counter_ns()
    run()
    return float(perf_counter_ns() - begun_ns)
