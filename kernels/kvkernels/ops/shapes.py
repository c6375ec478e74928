"""Which dtypes, heads and pages the kernels have: said here for all of them."""

from __future__ import annotations

import torch

HEAD_DIMS, PAGE_STEP = (64, 128), 16
DTYPES = (torch.bfloat16, torch.float16)


def unsupported_dtype(dtype: torch.dtype) -> str:
    """Why no kernel computes in `dtype`; empty: all do."""
    return "" if dtype in DTYPES else f"dtype {dtype} (the kernel has bfloat16 and float16)"


def unsupported_head(head_dim: int) -> str:
    """Why no kernel of attention takes such heads; empty: all do."""
    return "" if head_dim in HEAD_DIMS else f"head_dim {head_dim} (the kernel has 64 and 128)"


def unsupported_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    most_group: int,
) -> str:
    """Why a kernel whose groups have up to `most_group` heads cannot take it; empty: it can."""
    if why := unsupported_dtype(dtype) or unsupported_head(head_dim):
        return why
    if page_tokens % PAGE_STEP:
        return f"block_size {page_tokens} (the kernel has multiples of {PAGE_STEP})"
    if heads % kv_heads or heads // kv_heads > most_group:
        return f"{heads} heads for {kv_heads} KV heads (the kernel has groups of 1 to {most_group})"
    return ""
