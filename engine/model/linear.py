"""Linear layers of one shard: whole, cut by outputs (column-parallel) or inputs (row-parallel)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.model.int8 import Int8Weight
from engine.model.int8_choice import MOST_ROWS
from engine.model.tiles import cuts, linear_widths
from kvkernels.ops import w8a16 as _w8a16  # noqa: F401 - defines the operator

EXACT = (torch.float32, torch.float64)
MAX_WIDENED = 1 << 24  # INT8 weights that stand in the model's dtype at once


class Ranks(Protocol):
    """What the ranks of one tensor-parallel group do together."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, in order of rank, joined along the last dimension."""
        ...


class Alone:
    """A group of one rank."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether results there must not depend on the batch: float32 and float64 on the CPU."""
    return tensor.device.type == "cpu" and tensor.dtype in EXACT


class Linear:
    """x [T, inputs] -> [T, outputs] with `weight` [outputs, inputs]. Lifetime: model.

    On the CPU in float32 and float64 a row's result does not depend on the rows beside it.
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
            by_kernel = self.weight.has_kernel and len(x) <= MOST_ROWS
            y = (_by_kernel if by_kernel else _widened)(x, self.weight)
        elif is_exact(x):
            y = _in_tiles(x, self.weight)
        else:
            return functional.linear(x, self.weight, self.bias)
        return y if self.bias is None else y + self.bias


def _probe(weight: torch.Tensor, dtype: torch.dtype) -> None:
    if weight.device.type == "cpu" and dtype in EXACT:
        linear_widths(weight.shape[0], weight.shape[1], dtype)


def _in_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in tiles of rows that all give the same bits."""
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
    """x @ (q * scales).T, some output channels at a time, so that few weights are wide at once."""
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


def _by_kernel(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """x @ (q * scales).T by an operator that reads the weights as they are kept."""
    y = torch.empty(len(x), len(weight.q), dtype=x.dtype, device=x.device)
    torch.ops.warmroute.w8a16(x.contiguous(), weight.q, weight.scales, y)
    return y


def _parts(weight: Int8Weight) -> list[Int8Weight]:
    """Runs of output channels, of at most MAX_WIDENED weights or one channel."""
    outputs, inputs = weight.q.shape
    step = max(1, MAX_WIDENED // inputs)
    return [weight.part(slice(start, start + step)) for start in range(0, outputs, step)]


class RowParallel:
    """Each rank has some of the inputs: the ranks' results are added, then the bias, once."""

    def __init__(
        self, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None, ranks: Ranks
    ) -> None:
        self._linear = Linear(weight)
        self._bias, self._ranks = bias, ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ranks.reduce(self._linear(x))
        return y if self._bias is None else y + self._bias
