"""What multiplies few rows by INT8 weights: the kernel where it can, torch elsewhere, by name.

Torch widens the weights first, so it moves five bytes a weight or more, the kernel one; beyond
its rows torch does all. Reads no torch until `choose` is called.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.kernel_library import BACKENDS, KVKERNELS, TORCH, device_lacks
from engine.model.quantization import Quantization
from engine.model.shard import Shard

MOST_ROWS = 64  # of a step that the kernel takes: all that it has
KERNELS = ("w8a16",)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Int8Choice:
    """A backend, and why it is not the kernel. Lifetime: worker."""

    backend: str = TORCH
    why: str = ""

    def __str__(self) -> str:
        if self.backend == KVKERNELS:
            return f"{self.backend}, torch beyond {MOST_ROWS} rows"
        return f"{self.backend}, because of {self.why}" if self.why else self.backend

    def of_step(self, rows: int) -> str:
        """The backend of a step of `rows`, padding included."""
        return self.backend if rows <= MOST_ROWS else TORCH


def choose_int8(
    asked: str,
    config: ModelConfig,
    shards: Sequence[Shard],
    device: str,
    dtype: str,
    quantization: Quantization,
) -> Int8Choice | None:
    """What computes for `asked`, one of BACKENDS; None where no weights are INT8.

    `shards`: all of the model's. As `attention_choice.choose` for attention: auto takes the kernel
    on CUDA where it has all of the model's shapes. Raises ModelError where kvkernels were asked
    for and cannot be had, ValueError for another name.
    """
    if asked not in BACKENDS:
        raise ValueError(f"int8_backend must be one of {', '.join(BACKENDS)}, not {asked!r:.40}")
    if quantization.weights == "none":
        return None
    if asked == TORCH or (asked == "auto" and device == "cpu"):
        return Int8Choice()
    why = _shape_lacks(config, shards, dtype) if device != "cpu" else ""
    why = why or device_lacks(device, KERNELS)
    if not why:
        return Int8Choice(KVKERNELS)
    if asked == KVKERNELS:
        raise ModelError(
            config.path,
            f"int8_backend {KVKERNELS} cannot be: {why}",
            "serve it with int8_backend auto or torch",
        )
    log.warning("INT8 weights: torch, because of %s", why)
    return Int8Choice(TORCH, why)


def _shape_lacks(config: ModelConfig, shards: Sequence[Shard], dtype: str) -> str:
    """What of the model the kernel does not have; empty where it has all."""
    import torch

    from kvkernels.ops.w8a16 import unsupported

    wide: torch.dtype = getattr(torch, dtype)
    for shard in shards:
        heads, inner = shard.part(config.heads), shard.part(config.intermediate_size)
        attended = (heads.stop - heads.start) * config.head_dim
        for inputs in (config.hidden_size, attended, inner.stop - inner.start):
            if why := unsupported(1, inputs, wide):
                return why
    return ""
