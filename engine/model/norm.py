"""RMSNorm, of rows and of the heads of q and k."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """Weights [head_dim] that q and k are normed with before the rotation; None: they are not."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    # Not rsqrt: on CPUs its bits depend on where a number stands in the tensor.
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return weight * (wide / scale).to(x.dtype)
