"""Makes quantized pages for tests: INT8 and FP8, with a scale for each token and head."""

from __future__ import annotations

import torch

from tests.kernels.emulated import NAN, poisoned

STORED = [torch.int8, torch.float8_e4m3fn]
# The relative loss of the numbers: bytes have steps of 1/127 of the largest (INT8), or 3 bits of
# fraction (FP8).
LOSS = {torch.int8: 2e-2, torch.float8_e4m3fn: 5e-2}


def quantized_pages(
    k_pages: torch.Tensor, v_pages: torch.Tensor, stored: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return both tensors quantized in the engine's order, with their scales, under the operators'
    names. Rows of NaN get NaN as a scale and poison as bytes.
    """
    limit = 127.0 if stored == torch.int8 else 448.0
    pages, page_tokens, kv_heads, dim = k_pages.shape
    pool = poisoned(pages, kv_heads, 2, page_tokens, dim, dtype=stored)
    scales = torch.full((pages, kv_heads, 2, page_tokens), NAN)
    for kv, kept in enumerate((k_pages, v_pages)):
        wide = kept.float().transpose(1, 2)
        scale = wide.abs().amax(-1) / limit
        there = ~scale.isnan()
        units = (wide[there] / scale[there][:, None]).clamp(-limit, limit)
        units = units.round() if stored == torch.int8 else units
        pool[:, :, kv].view(torch.uint8)[there] = units.to(stored).view(torch.uint8)
        scales[:, :, kv] = scale
    return {
        "k_pages": pool[:, :, 0].transpose(1, 2),
        "v_pages": pool[:, :, 1].transpose(1, 2),
        "k_scales": scales[:, :, 0].transpose(1, 2),
        "v_scales": scales[:, :, 1].transpose(1, 2),
    }


def as_numbers(pages: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return in float64 the numbers that quantized bytes and their scales stand for."""
    return pages.double() if scales is None else pages.double() * scales.double()[..., None]
