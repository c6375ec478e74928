"""Attention by the kernels' operators: norm, rotation and write fused, decodes, chunks.

On CUDA these are kernels, on CPUs the operators' plain implementations: the same plans, buffers and
padding, so that all but the kernels is tried without a GPU. Nothing here waits for the device, and
a step without chunks can be captured: what changes from step to step is in the batch's buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.attention_backends import StepAttention
from engine.model.batch import FlatBatch
from engine.model.kernel_plan import prefill_part, shared_part
from engine.model.kv_cache import LayerKv
from engine.model.norm import HeadNorms
from engine.model.rope import Rotary
from kvkernels.ops import append as _append  # noqa: F401 - defines the operator
from kvkernels.ops.decode import workspace_of
from kvkernels.ops.prefill import prefill
from kvkernels.ops.shared_decode import shared_decode

Decode = Callable[[torch.Tensor, LayerKv, torch.Tensor], None]


class KernelAttention:
    """Batches must have a plan of `kernel_plan.KernelPlanner`."""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """Raises ValueError for a batch without a plan."""
        sizes = batch.sizes
        if not sizes.plan_words:
            raise ValueError("a batch for the kernels needs their plan: lay it out with a planner")
        decodes = sizes.decodes
        run_decodes = _decode_of(batch) if decodes else None
        prefill_plan = prefill_part(batch) if sizes.prefill_items else None

        def attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            norms: HeadNorms,
            layer: LayerKv,
        ) -> torch.Tensor:
            turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            torch.ops.warmroute.append(
                *(q, k, v, rotary.cos, rotary.sin, batch.positions, batch.slots),
                *(norms.q, norms.k, norms.eps, turned, *layer),
            )
            out = torch.empty_like(turned)
            if run_decodes is not None:
                run_decodes(turned[:decodes], layer, out[:decodes])
            if prefill_plan is not None:
                scale = q.shape[2] ** -0.5
                pages = layer.k, layer.v, batch.page_table
                prefill(turned, *pages, prefill_plan, scale, out, scales=layer[2:])
            return out

        return attention


def _decode_of(batch: FlatBatch) -> Decode:
    """What attends for the first requests; its workspace is one for all layers."""
    table = batch.page_table[: batch.sizes.decodes]
    plan = shared_part(batch)
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
        nonlocal workspace
        if workspace is None:
            workspace = workspace_of(plan, q.shape[1], q.shape[2], q.device)
        scale = q.shape[2] ** -0.5
        pages = layer.k, layer.v, table
        shared_decode(q, *pages, plan, scale, out, workspace, layer[2:])

    return run
