"""Costs of the kernels' plans and the fastest ways of attention: they are measured, kept in a file,
and read again.

Without a file, plans use predicted costs, and attention uses the kernels. A file is valid for the
device and library that it was measured with, and rejected for others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from engine.model.attention import attend
from engine.model.backends import ALL_KERNELS, CUDNN, FLASHINFER, MMA, SHAPES, Ways
from engine.model.batch import Piece, flat_batch, is_cuda
from engine.model.config import ModelConfig, ModelError
from engine.model.kernel_attention import KernelAttention, KernelPlanner
from engine.model.kernel_choice import flashinfer_lacks
from engine.model.kernel_trial import HOPPER, MOST_ERROR, row_error
from engine.model.kv_cache import LayerKv
from engine.model.layers import HeadNorms
from engine.model.rope import Rotary, rotate
from kvkernels.ops.calibration import PAGE, SAMPLES, Calibration
from kvkernels.ops.operator import cuda_library
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import Step, shared_decode, workspace_of

FLUSH_BYTES = 256 << 20  # read before each run; several times an L2 cache


class Timer:
    """Measures how long a function runs on `device`. Lifetime: one calibration."""

    def __init__(self, device: str) -> None:
        self._device = device
        is_gpu = is_cuda(device)
        self._flushed = torch.empty(FLUSH_BYTES if is_gpu else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the nanoseconds of one run."""
        if not is_cuda(self._device):
            begun_ns = perf_counter_ns()
            run()
            return float(perf_counter_ns() - begun_ns)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            # This takes longer than the launches, so these do not count; pending writes would
            # otherwise be flushed during the measurement.
            self._flushed.view(torch.float32).amax()
            begin.record()
            run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6


class DecodeTimer:
    """Measures one layer's attention on `device` with random numbers. Lifetime: one calibration."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: str) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._pool = self._random(0, shape.kv_heads, 2, PAGE, shape.head_dim)
        self._timer = Timer(device)

    def __call__(self, step: Step, page_table: torch.Tensor, pages: int) -> float:
        """Return the nanoseconds of one run by `step`'s plan over `pages` pages."""
        shape, device = self._shape, self._device
        if pages > len(self._pool):
            self._pool = self._random(pages, shape.kv_heads, 2, PAGE, shape.head_dim)
        k, v = (self._pool[:, :, kept].transpose(1, 2) for kept in (0, 1))
        q = self._random(len(page_table), shape.heads, shape.head_dim)
        out, table, plan = torch.empty_like(q), page_table.to(device), step.plan.on(device)
        workspace = workspace_of(plan, shape.heads, shape.head_dim, device)

        def run() -> None:
            shared_decode(q, k, v, table, plan, shape.head_dim**-0.5, out, workspace)

        return self._timer(run)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)


class Mixed(NamedTuple):
    """A step to time: its number of requests, which all have the same number of new tokens, of
    context tokens, and of shared tokens.
    """

    requests: int
    new: int
    context: int  # `new` included
    shared: int = 0

    def smaller(self) -> Mixed:
        """Return a smaller step of the same kind, for CPUs and for checks of the numbers."""
        new, shared = max(1, self.new // SMALLER), self.shared // SMALLER
        return Mixed(min(self.requests, 8), new, self.context // SMALLER, shared)

    def pieces(self) -> list[Piece]:
        """Return the step's pieces on blocks of PAGE tokens; the first blocks are shared."""
        common, all_ = self.shared // PAGE, -(-self.context // PAGE)
        made = []
        for row in range(self.requests):
            first = common + row * (all_ - common)
            blocks = [*range(common), *range(first, first + all_ - common)]
            made.append(Piece([0] * self.new, self.context - self.new, blocks))
        return made


SMALLER = 16
STEPS = MappingProxyType(
    {
        "decode_short": Mixed(32, 1, 1024),
        "decode_long": Mixed(4, 1, 16_384),
        "decode_shared": Mixed(32, 1, 4352, 4096),
        "prefill_fresh": Mixed(1, 2048, 2048),
        "prefill_hit": Mixed(1, 256, 8448),
    }
)
MOST_WIDE_ERROR = 1e-4  # of float32, as MOST_ERROR of 16 bits


class TimedLayer:
    """The attention of one layer in a step, computed in one way, with random numbers. Lifetime: its
    timing.
    """

    def __init__(
        self, config: ModelConfig, planner: KernelPlanner, step: Mixed, dtype: torch.dtype,
        device: str,
    ) -> None:  # fmt: skip
        shape, rows = planner.shape, step.requests * step.new
        draw = torch.Generator(device).manual_seed(rows)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=draw, dtype=dtype, device=device)

        pool = random(planner.blocks, shape.kv_heads, 2, PAGE, shape.head_dim)
        self._kept = LayerKv(*(pool[:, :, n].transpose(1, 2) for n in (0, 1)))
        self._q = random(rows, shape.heads, shape.head_dim)
        self._k, self._v = (random(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
        self._laid_out = flat_batch(step.pieces(), PAGE, device, planner)
        self._rope = config.rope, shape.head_dim, step.context
        rotary = Rotary(*self._rope, device, dtype)
        batch = self._laid_out.on(device)
        self._attention = KernelAttention(planner.ways).begin(batch, rotary)

    def run(self) -> torch.Tensor:
        """Compute the attention once, and return the result of each row."""
        norms = HeadNorms(None, None, 0.0)
        return self._attention(self._q, self._k, self._v, norms, self._kept)

    def error(self) -> float:
        """Compute the attention once, and return the error of its worst row against plain attention
        on the CPU in float64.
        """
        made, batch = self.run(), self._laid_out.on("cpu")
        exact = Rotary(*self._rope, "cpu", torch.float64)
        q = rotate(self._q.cpu().double(), *exact.rows(batch.positions))
        kept = LayerKv(self._kept.k.cpu().double(), self._kept.v.cpu().double())
        return row_error(made, attend(q, kept, batch))


class WayTimer:
    """Measures steps of each shape by each way of attention whose numbers are right. Lifetime: one
    calibration.
    """

    def __init__(
        self, config: ModelConfig, shape: AttentionShape, costs: Costs, dtype: torch.dtype,
        device: str,
    ) -> None:  # fmt: skip
        self._config, self._shape, self._costs = config, shape, costs
        self._dtype, self._device = dtype, device
        self._timer = Timer(device)

    def times(self) -> list[TimedWay]:
        """Return the times of all shapes by all ways, including the ways that cannot be used."""
        return [row for shape, ways in SHAPES.items() for row in self._times_of(shape, ways)]

    def _times_of(self, shape: str, ways: Sequence[str]) -> list[TimedWay]:
        why = {way: self._fault(shape, way) for way in ways}
        step = STEPS[shape] if is_cuda(self._device) else STEPS[shape].smaller()
        layers = {way: self._layer(step, way) for way in ways if not why[way]}
        times: dict[str, list[float]] = {way: [] for way in layers}
        for _ in range(SAMPLES):  # in turn, so that a disturbance affects all of them
            for way, layer in layers.items():
                times[way].append(self._timer(layer.run))
        medians = {way: median(own) / 1e3 for way, own in times.items()}
        return [TimedWay(shape, way, medians.get(way), why[way]) for way in ways]

    def _fault(self, shape: str, way: str) -> str:
        """Return the reason why `way` cannot be used for steps of `shape`; "" if it can and its
        numbers are right.
        """
        most = MOST_WIDE_ERROR if self._dtype == torch.float32 else MOST_ERROR
        try:
            lacks = self._lacks(way)
            error = 0.0 if lacks else self._layer(STEPS[shape].smaller(), way).error()
        except Exception as failed:  # noqa: BLE001 - every library has its own
            return f"a trial: {failed!s:.200}"
        return lacks or ("" if error < most else f"a trial: {error:.1e} off, {most:g} is right")

    def _lacks(self, way: str) -> str:
        """Return the property that the machine lacks for computing by `way`; "" if it lacks
        nothing.
        """
        is_gpu = is_cuda(self._device)
        if way == CUDNN and not is_gpu:
            return "a CPU"
        if way == FLASHINFER:
            return flashinfer_lacks(self._device, is_quantized=False)
        if way == MMA and not (is_gpu and torch.cuda.get_device_capability(self._device) == HOPPER):
            return "a device that has one kernel of prefill"
        return ""

    def _layer(self, step: Mixed, way: str) -> TimedLayer:
        blocks = 1 + max(max(piece.block_ids) for piece in step.pieces())
        ways = dict.fromkeys(SHAPES, way)
        planner = KernelPlanner(self._shape, blocks, PAGE, costs=self._costs, ways=ways)
        return TimedLayer(self._config, planner, step, self._dtype, self._device)


MAX_BYTES = 1 << 16
LARGEST = 1e15  # nanoseconds of a unit; no real value is above it


class Timed(msgspec.Struct, frozen=True):
    """The measured time of one layer in one decode step, in microseconds: by the plain plan, and by
    the plan that shares prefixes.
    """

    requests: int
    groups: int
    prefix_tokens: int
    own_tokens: int
    plain_us: float
    shared_us: float


class TimedWay(msgspec.Struct, frozen=True):
    """The measured time of one layer's attention in a step of one shape, computed in one way."""

    shape: str
    way: str
    us: float | None  # None: it is none here
    why_not: str = ""


def fastest(timed: Sequence[TimedWay]) -> Ways:
    """Return the fastest way of each shape; the kernels if none was timed."""
    found = dict(ALL_KERNELS)
    for one in sorted(timed, key=lambda one: -(one.us or 0.0)):
        if one.us is not None:
            found[one.shape] = one.way
    return found


class CostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file of kernel costs, as JSON."""

    device: str
    library: str
    costs: dict[str, float]
    is_wary: bool  # runs have to gain more than was fitted, because some were measured slower
    measured: list[Timed]
    ways: dict[str, str] = {}  # of attention, by shape; missing shapes use the kernels
    timed_ways: list[TimedWay] = []


def place_of(device: str) -> tuple[str, str]:
    """Return the name of the device and the name of the kernels' library, by which a file of costs
    is recognized.
    """
    if device == "cpu":
        return "cpu", "operators"
    return torch.cuda.get_device_name(device), cuda_library().path.name


def write_costs(
    path: Path, made: Calibration, device: str, timed_ways: Sequence[TimedWay] = ()
) -> None:
    """Write the costs to a file, completely or not at all. Raises OSError if that fails."""
    rows = [Timed(*one.mix, one.plain_ns / 1e3, one.shared_ns / 1e3) for one in made.measured]
    file = CostsFile(
        *(*place_of(device), made.costs._asdict(), made.is_wary, rows),
        ways=dict(fastest(timed_ways)),
        timed_ways=list(timed_ways),
    )
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_costs(path: Path, device: str) -> Costs:
    """Return the costs in the file. Raises ModelError for an invalid file or one of another device,
    OSError if it cannot be read.
    """
    return Costs(**_read(path, device).costs)


def read_ways(path: Path, device: str) -> Ways:
    """Return the fastest way of attention of each shape, as the file has it. Raises the errors of
    `read_costs`.
    """
    return {**ALL_KERNELS, **_read(path, device).ways}


def _read(path: Path, device: str) -> CostsFile:
    again = "measure again: warmroute-engine calibrate-kernels"
    with path.open("rb") as opened:
        data = opened.read(MAX_BYTES + 1)
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
    for shape, way in file.ways.items():
        if way not in SHAPES.get(shape, ()):
            raise ModelError(path, f"has {way:.40} for {shape:.40}", again)
    return file
