"""Costs of the kernels' plans: timed on a device, kept in a file, read at start.

Without a file, plans go by predictions. A file is good for the device and the library that it was
measured with, and refused for others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import msgspec
import torch

from engine.model.batch import is_cuda
from engine.model.config import ModelError
from kvkernels.ops.calibration import PAGE, Calibration
from kvkernels.ops.operator import cuda_library
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import Step, shared_decode, workspace_of

FLUSH_BYTES = 256 << 20  # read before each run; several times an L2 cache


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
            # Takes longer than the launches, which so do not count; writes would be flushed later,
            # in the time of what is measured.
            self._flushed.view(torch.float32).amax()
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


MAX_BYTES = 1 << 16
LARGEST = 1e15  # nanoseconds of a unit, above which nothing would be


class Timed(msgspec.Struct, frozen=True):
    """One step of the grid, in microseconds of one layer."""

    requests: int
    groups: int
    prefix_tokens: int
    own_tokens: int
    plain_us: float
    shared_us: float


class CostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says, as JSON."""

    device: str
    library: str
    costs: dict[str, float]
    is_wary: bool  # runs have to gain more than was fitted, for what was measured slower
    measured: list[Timed]


def place_of(device: str) -> tuple[str, str]:
    """The device's name, and its kernels'."""
    if device == "cpu":
        return "cpu", "operators"
    return torch.cuda.get_device_name(device), cuda_library().path.name


def write_costs(path: Path, made: Calibration, device: str) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    rows = [Timed(*one.mix, one.plain_ns / 1e3, one.shared_ns / 1e3) for one in made.measured]
    file = CostsFile(*place_of(device), made.costs._asdict(), made.is_wary, rows)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_costs(path: Path, device: str) -> Costs:
    """The costs in the file. Raises ModelError for one that is none, or another device's, OSError
    where it cannot be read."""
    again = "measure again: warmroute-engine calibrate-kernels"
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ModelError(path, f"has more than {MAX_BYTES} bytes", again)
    try:
        file = msgspec.json.decode(data, type=CostsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(path, f"is no file of kernel costs: {error}", again) from error
    if set(file.costs) != set(Costs._fields):
        raise ModelError(path, f"has costs {', '.join(file.costs)[:200]}", again)
    for name, value in file.costs.items():
        if not (math.isfinite(value) and 0 <= value <= LARGEST):
            raise ModelError(path, f"says {value} for {name}", again)
    if (file.device, file.library) != (here := place_of(device)):
        found = f"{file.device:.80} with {file.library:.80}"
        raise ModelError(path, f"was measured on {found}, this is {' with '.join(here)}", again)
    return Costs(**file.costs)
