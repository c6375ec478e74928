"""INT8 weights: one symmetric scale per output channel, computed with in the model's dtype.

|w - q * scale| <= scale / 2 for every weight. The scales come from whole rows of the checkpoint,
so that shards cut by inputs have the scales, and the integers, of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

LIMIT = 127  # -128 is left unused: the range is symmetric
MAX_READ = 1 << 24  # elements that are quantized at once


class Int8Weight(NamedTuple):
    """A matrix [outputs, inputs] in integers. Lifetime: model."""

    q: torch.Tensor  # int8[outputs, inputs]
    scales: torch.Tensor  # [outputs], float32, or float64 in float64 models
    dtype: torch.dtype  # of the model
    has_kernel: bool = False  # few rows are multiplied by `w8a16`

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """Those rows as numbers: what an embedding gives for ids."""
        wide = self.scales.dtype
        return (self.q[which].to(wide) * self.scales[which].unsqueeze(-1)).to(self.dtype)

    def part(self, rows: slice) -> Int8Weight:
        """Those rows with their scales; shares memory."""
        return self._replace(q=self.q[rows], scales=self.scales[rows])


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> int8 of the same shape, float32 scales [outputs]."""
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
    """Quantize `rows` of a matrix whose whole rows `read` gives, and keep `columns` of them.

    Works in pieces, so that the wide weights are never in memory as a whole.
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
