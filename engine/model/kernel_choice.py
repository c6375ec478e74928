"""Decides which parts of a model CUDA kernels compute: attention, INT8 weights; torch computes the
rest.

The module imports no torch until a function is called, so that command lines know the names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from engine.model.backends import (
    ALL_KERNELS,
    ATTENTION_KERNELS,
    BACKENDS,
    FLASHINFER,
    INT8_KERNELS,
    KVKERNELS,
    LEAST_CAPABILITY,
    MOST_ROWS,
    TORCH,
    Int8Choice,
    KernelChoice,
    Ways,
)
from engine.model.config import ModelConfig, ModelError, Quantization, Shard

if TYPE_CHECKING:
    import torch

    from engine.model.kernel_trial import AttentionTrial

log = logging.getLogger(__name__)


def device_lacks(device: str, kernels: Sequence[str]) -> str:
    """Return the property that the machine lacks for `kernels`; "" if it lacks nothing, and then
    the library of kernels is loaded.

    The function may build the library, which takes minutes. A CPU lacks nothing, because its
    operators are plain torch.
    """
    if device == "cpu":
        return ""
    import torch

    from kvkernels.cuda.library import BuildError, LaunchError, RefusedError, find_cuda
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
        library = cuda_library()
        missing = [name for name in kernels if not hasattr(library.functions, f"wr_{name}")]
        if not missing:
            with torch.cuda.device(device):
                log.info("kernels on %s: %s", device, library.device())
    except (BuildError, LaunchError, RefusedError, OSError, AttributeError) as error:
        return f"the kernels' library: {error!s:.500}"
    return f"the kernels' library, which lacks {', '.join(missing)}" if missing else ""


def choose_attention(
    backend: str,
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: str,
    quantization: Quantization,
    block_size: int,
    ways: Ways = ALL_KERNELS,
) -> KernelChoice:
    """Choose the backend of attention. `backend` is the requested one of BACKENDS; `ways` has the
    measured fastest way of each shape.

    With auto, CUDA devices get the kernels, if they support this shape and a trial of each gives
    the numbers of the CPU's operator (`kernel_trial`), else torch. On CPUs kvkernels means the
    operators' plain implementations. This may build the kernels' library, which takes minutes.
    Raises ModelError if the requested backend cannot be used, ValueError for another name.
    """

    def shape_lacks() -> str:
        return _attention_lacks(config, shard, device, dtype, quantization, block_size)

    _check_backend("attention_backend", backend)

    def trial() -> AttentionTrial:
        import torch

        from engine.model.kernel_trial import AttentionTrial
        from engine.model.kv_cache import kv_storage

        wide: torch.dtype = getattr(torch, dtype)
        stored = kv_storage(config, quantization.kv, device, wide)
        heads, kv_heads = shard.part(config.heads), shard.kv_heads(config.kv_heads)
        shape = heads.stop - heads.start, kv_heads.stop - kv_heads.start, config.head_dim
        return AttentionTrial(*shape, block_size, wide, stored)

    def kernels_trial() -> str:
        from engine.model.kernel_trial import on_device

        return trial().first_fault(on_device, device)

    wants = "attention", backend, config, device, ATTENTION_KERNELS
    why_torch = _reason_for_torch(*wants, shape_lacks, kernels_trial)
    if why_torch is not None:
        return KernelChoice(TORCH, why_torch)
    if FLASHINFER in ways.values() and (why := _flashinfer_fault(device, trial())):
        log.warning("the kernels compute what FlashInfer was faster at, because of %s", why)
        ways = {shape: KVKERNELS if way == FLASHINFER else way for shape, way in ways.items()}
    return KernelChoice(KVKERNELS, ways=ways)


def _flashinfer_fault(device: str, made: AttentionTrial) -> str:
    """Return the reason why FlashInfer cannot compute this model's shape; "" if it can. FlashInfer
    may compile for minutes, so this function is not called within a request's step.
    """
    return flashinfer_lacks(device, made.is_quantized) or made.flashinfer_fault(device)


def flashinfer_lacks(device: str, is_quantized: bool) -> str:
    """Return the reason why FlashInfer can compute no part of a step; "" if it can. `is_quantized`
    says whether the cache is quantized.
    """
    if not device.startswith("cuda"):
        return "a CPU"
    if is_quantized:
        return "a quantized cache, for whose scales FlashInfer has no place"
    try:
        import_module("flashinfer")
    except Exception as error:  # noqa: BLE001 - what it needs itself may fail in any way
        return f"FlashInfer, which cannot be imported: {error!s:.200}"
    return ""


def choose_int8(
    backend: str,
    config: ModelConfig,
    shards: Sequence[Shard],
    device: str,
    dtype: str,
    quantization: Quantization,
) -> Int8Choice | None:
    """Choose the backend of products with INT8 weights; return None if the model has no such
    weights. `backend` is the requested one of BACKENDS, and `shards` has all shards of the model.
    The rules and errors are those of `choose_attention`.
    """
    _check_backend("int8_backend", backend)
    if quantization.weights == "none":
        return None

    def shape_lacks() -> str:
        return _int8_lacks(config, shards, dtype)

    def trial() -> str:
        import torch

        from engine.model.kernel_trial import int8_fault, on_device

        return int8_fault(getattr(torch, dtype), MOST_ROWS, on_device, device)

    why = _reason_for_torch("int8", backend, config, device, INT8_KERNELS, shape_lacks, trial)
    return Int8Choice(KVKERNELS) if why is None else Int8Choice(TORCH, why)


def _check_backend(setting: str, backend: str) -> None:
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"{setting} must be one of {known}, not {backend!r:.40}")


def _reason_for_torch(
    part: str,
    backend: str,
    config: ModelConfig,
    device: str,
    kernels: Sequence[str],
    shape_lacks: Callable[[], str],
    trial: Callable[[], str],
) -> str | None:
    """Return the reason why torch computes `part`, or "" if nobody asked for the kernels. Return
    None if the kernels compute it.
    """
    if backend == TORCH or (backend == "auto" and device == "cpu"):
        return ""
    why = shape_lacks() if device != "cpu" else ""
    why = why or device_lacks(device, kernels)
    if not why and device != "cpu":
        why = trial()
    if not why:
        return None
    if backend == KVKERNELS:
        raise _cannot_be(config, part, KVKERNELS, why)
    log.warning("%s: torch, because of %s", "INT8 weights" if part == "int8" else part, why)
    return why


def _cannot_be(config: ModelConfig, part: str, backend: str, why: str) -> ModelError:
    return ModelError(
        config.path,
        f"{part}_backend {backend} cannot be: {why}",
        f"serve it with {part}_backend auto or torch",
    )


def _attention_lacks(
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: str,
    quantization: Quantization,
    block_size: int,
) -> str:
    """Return the property of the model that the attention kernels do not support; "" if they
    support the model.
    """
    import torch

    from engine.model.kv_cache import kv_storage
    from kvkernels.ops import append, prefill, shared_decode

    wide: torch.dtype = getattr(torch, dtype)
    stored = kv_storage(config, quantization.kv, device, wide)
    heads = shard.part(config.heads)
    kv_heads = shard.kv_heads(config.kv_heads)
    shape = heads.stop - heads.start, kv_heads.stop - kv_heads.start, config.head_dim
    return (
        append.unsupported(config.head_dim, wide, stored)
        or shared_decode.unsupported(*shape, block_size, wide)
        or prefill.unsupported(*shape, block_size, wide)
    )


def _int8_lacks(config: ModelConfig, shards: Sequence[Shard], dtype: str) -> str:
    """Return the property of the model that the INT8 kernel does not support; "" if it supports the
    model.
    """
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
