"""The operator `append`: it norms and rotates q and k, returns q, and writes K and V to pages.

Its CUDA kernel is in `cuda/append.cuh`.

`torch.ops.warmroute.append(q, k, v, cos, sin, positions, slots, q_weight, k_weight, eps, q_out,
k_pages, v_pages, k_scales, v_scales)`:

    q, q_out            [T, heads, head_dim]; k, v [T, kv_heads, head_dim]
    cos, sin            [positions, head_dim / 2], float32
    positions, slots    int64[T]; slot page * page_tokens + offset, -1: computed, kept nowhere
    q_weight, k_weight  [head_dim] or None, for RMSNorm with eps
    k_pages, v_pages    [page, token, kv_heads, head_dim] of q's dtype, int8 or float8_e4m3fn
    k_scales, v_scales  float32 [page, token, kv_heads] where pages are quantized, else None

On CUDA: bfloat16 and float16, head_dim 64 and 128, rows at multiples of 16 bytes; everything is
computed in float32 and rounded once. A slot outside the pages is kept nowhere there, a position
outside the table reads its last row; on CPUs both raise ValueError.
"""

from __future__ import annotations

import torch

from kvkernels.ops.operator import define, unsupported_dtype, unsupported_head

INT8_LIMIT, E4M3_LIMIT = 127.0, 448.0
STORED = (torch.int8, torch.float8_e4m3fn)


def unsupported(head_dim: int, dtype: torch.dtype, stored: torch.dtype) -> str:
    """Return the reason why the CUDA kernel does not support these sizes and dtypes, with pages of
    `stored`; "" if it supports them.
    """
    if why := unsupported_dtype(dtype):
        return why
    if stored not in (dtype, *STORED):
        return f"KV in {stored} (the kernel has {dtype}, int8 and float8_e4m3fn)"
    return unsupported_head(head_dim)


def append_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    q_out: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Compute the operator on the CPU, in float64 if q is float64, else in float32."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pages, page_tokens = k_pages.shape[:2]
    _check(positions, 0, len(cos), "positions")
    _check(slots, -1, pages * page_tokens, "slots")
    cosines, sines = (table[positions].to(wide)[:, None] for table in (cos, sin))

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.to(wide)
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.to(wide)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * cosines - second * sines, second * cosines + first * sines), dim=-1
        )

    q_out.copy_(turned(q, q_weight))
    kept = slots >= 0
    at = (slots[kept] // page_tokens, slots[kept] % page_tokens)
    for x, into, scales in (
        (turned(k, k_weight)[kept], k_pages, k_scales),
        (v.to(wide)[kept], v_pages, v_scales),
    ):
        if scales is not None:
            limit = INT8_LIMIT if into.dtype == torch.int8 else E4M3_LIMIT
            scale = (x.abs().amax(-1) / limit).clamp_min(torch.finfo(torch.float32).tiny)
            scales[at] = scale.to(scales.dtype)
            x = (x / scale[..., None]).clamp(-limit, limit)
            x = x.round() if into.dtype == torch.int8 else x
        if into.element_size() == 1:  # as bytes: torch cannot index FP8
            into.view(torch.uint8)[at] = x.to(into.dtype).view(torch.uint8)
        else:
            into[at] = x.to(into.dtype)


def _check(values: torch.Tensor, least: int, end: int, name: str) -> None:
    if len(values) and not (least <= int(values.min()) and int(values.max()) < end):
        raise ValueError(
            f"{name} go from {int(values.min())} to {int(values.max())}, outside [{least}, {end})"
        )


define("append", append_on_cpu, ("q_out", "k_pages", "v_pages", "k_scales", "v_scales"))
