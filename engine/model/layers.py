"""Layers whose results do not depend on the batch: RMSNorm, linear layers, INT8 weights.

A request's numbers must not depend on the other requests in its batch, but libraries for CPUs add
up in an order that depends on the shape. So products are cut into tiles of sizes that a probe found
to give equal results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from engine.model.backends import MOST_ROWS, device_lost
from kvkernels.ops import w8a16 as _w8a16  # noqa: F401 - defines the operator

log = logging.getLogger(__name__)


class HeadNorms(NamedTuple):
    """Weights [head_dim] by which q and k are normed before the rotation; None means no norm."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm (Zhang and Sennrich 2019) of x over the last dimension, computed in float32 or
    float64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    # Not rsqrt: on CPUs its bits depend on a number's position in the tensor.
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return weight * (wide / scale).to(x.dtype)


WIDTHS = (16, 64, 256)  # rows of a tile, narrowest first
ROW_BY_ROW = (1,)


@cache
def linear_widths(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of rows in WIDTHS for which the product x[rows, inputs] @ W[outputs,
    inputs].T gives each row the same bits.
    """
    weight = _random((outputs, inputs), dtype)
    return agreeing(lambda rows: functional.linear(rows, weight), inputs, dtype)


@cache
def attention_widths(head_dim: int, keys: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of rows for which both products of attention over a tile of `keys` keys
    give each row the same bits.
    """
    k, v = _random((1, head_dim, keys), dtype), _random((1, keys, head_dim), dtype)
    scores = agreeing(lambda rows: torch.bmm(rows[None], k)[0], head_dim, dtype)
    mixed = agreeing(lambda rows: torch.bmm(rows[None], v)[0], keys, dtype)
    return tuple(width for width in scores if width in mixed) or ROW_BY_ROW


def agreeing(
    multiply: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the widths whose rows equal those of the narrowest width at any position, or
    ROW_BY_ROW if there are none.
    """
    rows = _random((WIDTHS[-1], inputs), dtype)

    def in_tiles(of: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat([multiply(tile.clone()) for tile in torch.split(of, width)])

    base = in_tiles(rows, WIDTHS[0])
    agree = []
    for width in WIDTHS:
        turned = in_tiles(rows.flip(0), width).flip(0)
        if torch.equal(in_tiles(rows, width), base) and torch.equal(turned, base):
            agree.append(width)
    return tuple(agree) if WIDTHS[0] in agree else ROW_BY_ROW


def cuts(rows: int, widths: tuple[int, ...]) -> list[int]:
    """Return tile widths, widest first, that cover `rows`; only the last tile may be wider than
    what is left.
    """
    chosen, left = [], rows
    for width in reversed(widths):
        chosen += [width] * (left // width)
        left %= width
    return chosen + [widths[0]] * (left > 0)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


LIMIT = 127  # -128 is left unused: the range is symmetric
MAX_READ = 1 << 24  # elements that are quantized at once


class Int8Kernel:
    """Computes products of few rows by the operator `w8a16`, and by torch after that has failed
    once. Lifetime: model.
    """

    def __init__(self) -> None:
        self.fell_back = ""  # why torch does it by now

    def __call__(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        """Return x @ (q * scales).T, reading the weights as they are stored."""
        if not self.fell_back:
            y = torch.empty(len(x), len(weight.q), dtype=x.dtype, device=x.device)
            try:
                torch.ops.warmroute.w8a16(x.contiguous(), weight.q, weight.scales, y)
                return y
            except Exception as error:
                if device_lost(x.device):
                    raise
                self.fell_back = f"a kernel that failed: {error!s:.300}"
                log.error("INT8 weights: torch from here on, because of %s", self.fell_back)
        return _widened(x, weight)


class Int8Weight(NamedTuple):
    """A matrix [outputs, inputs] of integers. Lifetime: model."""

    q: torch.Tensor  # int8[outputs, inputs]
    scales: torch.Tensor  # [outputs], float32, or float64 in float64 models
    dtype: torch.dtype  # of the model
    kernel: Int8Kernel | None = None  # multiplies few rows

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """Return these rows of the matrix as numbers. For an embedding, `which` has token ids."""
        wide = self.scales.dtype
        return (self.q[which].to(wide) * self.scales[which].unsqueeze(-1)).to(self.dtype)

    def part(self, rows: slice) -> Int8Weight:
        """Return these rows with their scales, as views that share the matrix's memory."""
        return self._replace(q=self.q[rows], scales=self.scales[rows])


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [outputs, inputs] to int8 of the same shape, with float32 scales [outputs]."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    scales = (wide.abs().amax(-1) / LIMIT).float()
    # A row of zeros has a scale that zeros can be divided by.
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    q = (wide / scales.to(wide.dtype).unsqueeze(-1)).round().clamp(-LIMIT, LIMIT)
    return q.to(torch.int8), scales


def read_rows(
    read: Callable[[slice], torch.Tensor],
    rows: slice,
    inputs: int,
    columns: slice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `rows` of a matrix, whose whole rows `read` returns, and keep `columns` of them.

    It works in pieces, so that the wide weights are never in memory as a whole.
    """
    kept = len(range(*(columns or slice(None)).indices(inputs)))
    outputs = rows.stop - rows.start
    q, scales = torch.empty((outputs, kept), dtype=torch.int8), torch.empty(outputs)
    step = max(1, MAX_READ // inputs)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        found, scale = quantize_rows(read(slice(start, stop)))
        own = slice(start - rows.start, stop - rows.start)
        q[own] = found if columns is None else found[:, columns]
        scales[own] = scale
    return q, scales


EXACT = (torch.float32, torch.float64)
MAX_WIDENED = 1 << 24  # most INT8 weights that exist in the model's dtype at once


class Ranks(Protocol):
    """The collective operations of the ranks of one tensor-parallel group."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` in order of rank, joined along the last dimension."""


class Alone:
    """A tensor-parallel group that has only one rank."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def is_exact(tensor: torch.Tensor) -> bool:
    """Return whether results from this tensor must not depend on the rest of the batch, which holds
    for float32 and float64 on the CPU.
    """
    return tensor.device.type == "cpu" and tensor.dtype in EXACT


class Linear:
    """A linear layer, which maps x [T, inputs] to [T, outputs] with `weight` [outputs, inputs].
    Lifetime: model. On the CPU in float32 and float64, a row's result does not depend on the other
    rows.
    """

    def __init__(self, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        # Probes for row counts take a while: now, not in the first step.
        if isinstance(weight, Int8Weight):
            for part in _parts(weight):
                _probe(part.q, weight.dtype)
        else:
            _probe(weight, weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Int8Weight):
            kernel = self.weight.kernel if len(x) <= MOST_ROWS else None
            y = (kernel or _widened)(x, self.weight)
        elif is_exact(x):
            y = _in_tiles(x, self.weight)
        else:
            return functional.linear(x, self.weight, self.bias)
        return y if self.bias is None else y + self.bias


def _probe(weight: torch.Tensor, dtype: torch.dtype) -> None:
    if weight.device.type == "cpu" and dtype in EXACT:
        linear_widths(weight.shape[0], weight.shape[1], dtype)


def _in_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T, computed in tiles of rows that all give the same bits."""
    if x.shape[0] == 0:
        return functional.linear(x, weight)
    outputs, inputs = weight.shape
    tiles = cuts(x.shape[0], linear_widths(outputs, inputs, x.dtype))
    padding = sum(tiles) - x.shape[0]
    padded = functional.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    done = [functional.linear(tile, weight) for tile in torch.split(padded, tiles)]
    y = torch.cat(done) if len(done) > 1 else done[0]
    return y[: x.shape[0]]


def _widened(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Return x @ (q * scales).T, with a part of the output channels at a time, so that few weights
    are wide at once.
    """
    multiply = _in_tiles if is_exact(x) else functional.linear
    parts = []
    for part in _parts(weight):
        if x.dtype == torch.float16:
            # Sums over unscaled integers could leave float16's range.
            wide = (part.q * part.scales.unsqueeze(-1)).to(x.dtype)
            parts.append(multiply(x, wide))
        else:
            # Integers up to 127 are exact in every other dtype.
            parts.append((multiply(x, part.q.to(x.dtype)) * part.scales).to(x.dtype))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _parts(weight: Int8Weight) -> list[Int8Weight]:
    """Return runs of output channels, each of at most MAX_WIDENED weights or one channel."""
    outputs, inputs = weight.q.shape
    step = max(1, MAX_WIDENED // inputs)
    return [weight.part(slice(start, start + step)) for start in range(0, outputs, step)]


class RowParallel:
    """A linear layer of which each rank has some inputs: the ranks' results are added, then the
    bias, once.
    """

    def __init__(
        self, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None, ranks: Ranks
    ) -> None:
        self._linear = Linear(weight)
        self._bias, self._ranks = bias, ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ranks.reduce(self._linear(x))
        return y if self._bias is None else y + self._bias
