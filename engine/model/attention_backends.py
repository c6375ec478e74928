"""What computes attention: begun once a step, then called for each layer.

`TorchAttention` is plain torch everywhere; `kernel_attention.py` has the kernels' operators.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.model.attention import attend, write
from engine.model.batch import FlatBatch
from engine.model.kv_cache import LayerKv
from engine.model.norm import HeadNorms, rms_norm
from engine.model.rope import Rotary, rotate


class StepAttention(Protocol):
    """One step's attention, for all layers. Lifetime: step; of a captured step: worker."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: HeadNorms,
        layer: LayerKv,
    ) -> torch.Tensor:
        """q [T, heads, head_dim], k and v [T, kv heads, head_dim], as projected -> q's shape.

        Norms and rotates q and k, keeps K and V in `layer`, attends. Padding's rows mean nothing.
        """
        ...


class Attention(Protocol):
    """A way to compute attention. Lifetime: model."""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """What `batch`, on the model's device, is computed with; waits for nothing there."""
        ...


class TorchAttention:
    """Plain torch: the path of CPUs, exact there in float32 and float64."""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        cos, sin = rotary.rows(batch.positions)

        def attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            norms: HeadNorms,
            layer: LayerKv,
        ) -> torch.Tensor:
            if norms.q is not None and norms.k is not None:
                q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
            write(rotate(k, cos, sin), v, layer, batch.slots)
            return attend(rotate(q, cos, sin), layer, batch)

        return attention
