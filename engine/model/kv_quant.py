"""K and V in one byte an element, with one scale per token and head.

A token's K and V are quantized once, when they are written, and its own step reads them from the
cache as every later one does. So what is attended to does not depend on chunks or cache hits,
and a token that is computed again gets the same bytes.
INT8: symmetric, absmax / 127. FP8: e4m3 (Micikevicius et al. 2022, "FP8 formats for deep
learning"), absmax / 448.
"""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.quantization import KV_ALIGNMENT_BYTES

SCALES = torch.float32
FP8 = torch.float8_e4m3fn


def kv_storage(config: ModelConfig, kv: str, device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the pool for the setting `kv` in a model of `dtype`.

    Raises ModelError for a head_dim whose rows are not aligned, and for fp8 where torch cannot
    convert to it on `device`.
    """
    if kv == "auto":
        return dtype
    if config.head_dim % KV_ALIGNMENT_BYTES:
        raise ModelError(
            config.path,
            f"head_dim {config.head_dim} is no multiple of {KV_ALIGNMENT_BYTES}, which "
            f"kv_dtype {kv} needs",
            "serve it with kv_dtype auto",
        )
    if kv == "int8":
        return torch.int8
    if kv != "fp8":
        raise ValueError(f"kv_dtype {kv!r:.40} is unknown")
    try:
        torch.ones(1, device=device).to(FP8).float()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ModelError(
            config.path,
            f"kv_dtype fp8: torch has no {FP8} on {device} ({error!s:.120})",
            "serve it with kv_dtype int8 or auto",
        ) from error
    return FP8


def largest(storage: torch.dtype) -> float:
    """The value that a row's absmax becomes: 127 or 448."""
    return 127.0 if storage == torch.int8 else float(torch.finfo(storage).max)


def quantize(x: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] -> `storage` of the same shape, float32 scales [...]; NaN stays NaN by scale.

    Errors: at most scale / 2 in INT8; in FP8 at most |x| / 16, or scale * 2**-10 near zero.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    limit = largest(storage)
    scales = (wide.abs().amax(-1) / limit).to(SCALES)
    # A row of zeros has a scale that zeros can be divided by.
    scales = scales.clamp_min(torch.finfo(SCALES).tiny)
    units = (wide / scales.to(wide.dtype).unsqueeze(-1)).clamp(-limit, limit)
    return (units.round() if storage == torch.int8 else units).to(storage), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """values [..., dim] and scales [...] -> numbers in `wide`."""
    return values.to(wide) * scales.to(wide).unsqueeze(-1)
