"""Makes calls of the operator `w8a16` for tests, and checks their results."""

from __future__ import annotations

import torch

from tests.kernels.emulated import poisoned


def case(
    rows: int, channels: int, inputs: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[torch.Tensor]:
    """Return x, q and scales as the engine quantizes them, without its imports, and a poisoned
    output.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=draw).to(dtype)
    weights = torch.randn(channels, inputs, generator=draw) * 0.02
    scales = weights.abs().amax(-1) / 127
    q = (weights / scales[:, None]).round().to(torch.int8)
    return [x, q, scales, poisoned(rows, channels, dtype=dtype)]


def exact(made: list[torch.Tensor]) -> torch.Tensor:
    x, q, scales, out = made
    wide = torch.full_like(out, float("nan"), dtype=torch.float64)
    torch.ops.warmroute.w8a16(x.double(), q, scales, wide)
    return wide
