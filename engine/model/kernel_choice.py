"""Which CUDA kernels this machine can run, and whether one multiplies INT8 weights.

Imports no torch until a function is called, so that command lines know the names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig, ModelError, Quantization, Shard

TORCH, KVKERNELS = "torch", "kvkernels"  # what computes a part of a model
BACKENDS = ("auto", TORCH, KVKERNELS)
LEAST_CAPABILITY = (8, 0)

log = logging.getLogger(__name__)


def device_lacks(device: str, kernels: Sequence[str]) -> str:
    """What of the machine; empty where it has all `kernels`, and then the library is loaded.

    May build it, which takes minutes. CPUs lack nothing: there operators are plain torch.
    """
    if device == "cpu":
        return ""
    import torch

    from kvkernels.cuda.library import BuildError, LaunchError, find_cuda
    from kvkernels.ops.operator import cuda_library

    if not device.startswith("cuda"):
        return f"device {device} (the kernels are for CUDA)"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"compute capability {found[0]}.{found[1]} (the kernels need {least})"
    try:
        if find_cuda() is None:
            log.warning("building the CUDA kernels, once: this takes minutes")
        functions = cuda_library().functions
        missing = [name for name in kernels if not hasattr(functions, f"wr_{name}")]
    except (BuildError, LaunchError, OSError, AttributeError) as error:
        return f"the kernels' library: {error!s:.500}"
    return f"the kernels' library, which lacks {', '.join(missing)}" if missing else ""


MOST_ROWS = 64  # of a step that the kernel takes: all that it has
KERNELS = ("w8a16",)


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
