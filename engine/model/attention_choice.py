"""Which attention a model is served with: the kernels where they can, torch elsewhere, by name.

Reads no torch until `choose` is called, so that command lines know the names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model.config import ModelConfig, ModelError, Quantization, Shard
from engine.model.kernel_choice import BACKENDS, KVKERNELS, TORCH, device_lacks

if TYPE_CHECKING:
    import torch

    from engine.model.attention import Attention

KERNELS = ("append", "decode", "prefill", "shared_decode")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend, and why it is not the kernels. Lifetime: worker."""

    backend: str = TORCH
    why: str = ""

    def __str__(self) -> str:
        return f"{self.backend}, because of {self.why}" if self.why else self.backend


def choose(
    asked: str,
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: str,
    quantization: Quantization,
    block_size: int,
) -> AttentionChoice:
    """What computes attention for `asked`, one of BACKENDS.

    auto: the kernels on CUDA where they have this shape, else torch. On CPUs kvkernels are the
    operators' plain implementations. May build the kernels' library, which takes minutes. Raises
    ModelError where kvkernels were asked for and cannot be had, ValueError for another name.
    """
    if asked not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"attention_backend must be one of {known}, not {asked!r:.40}")
    if asked == TORCH or (asked == "auto" and device == "cpu"):
        return AttentionChoice()
    why = _shape_lacks(config, shard, device, dtype, quantization, block_size)
    why = why or device_lacks(device, KERNELS)
    if not why:
        return AttentionChoice(KVKERNELS)
    if asked == KVKERNELS:
        raise ModelError(
            config.path,
            f"attention_backend {KVKERNELS} cannot be: {why}",
            "serve it with attention_backend auto or torch",
        )
    log.warning("attention: torch, because of %s", why)
    return AttentionChoice(TORCH, why)


def attention_of(backend: str) -> Attention:
    """The backend of that name."""
    from engine.model.attention import TorchAttention
    from engine.model.kernel_attention import KernelAttention

    return KernelAttention() if backend == KVKERNELS else TorchAttention()


def _shape_lacks(
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: str,
    quantization: Quantization,
    block_size: int,
) -> str:
    """What of the model the kernels do not have; empty where they have all."""
    if device == "cpu":
        return ""
    import torch

    from engine.model.kv_cache import kv_storage
    from kvkernels.ops import append, decode, prefill

    wide: torch.dtype = getattr(torch, dtype)
    stored = kv_storage(config, quantization.kv, device, wide)
    heads = shard.part(config.heads)
    kv_heads = shard.kv_heads(config.kv_heads)
    shape = heads.stop - heads.start, kv_heads.stop - kv_heads.start, config.head_dim
    return (
        append.unsupported(config.head_dim, wide, stored)
        or decode.unsupported(*shape, block_size, wide)
        or prefill.unsupported(*shape, block_size, wide)
    )
