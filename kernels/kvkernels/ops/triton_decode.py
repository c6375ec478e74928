"""Decode over pages in Triton's language, for GPUs that the CUDA kernels' library does not serve.

Keys are split by SPLIT tokens of a request's own context, so that a request's bits do not depend
on its neighbours; a second kernel merges partial results by their base-2 log-sum-exps. Triton's
interpreter (TRITON_INTERPRET=1) runs both on CPUs, which is how they are tested. They have not yet
run on a GPU. Importing this imports Triton, which is torch's on CUDA and optional elsewhere.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl

SPLIT = 512  # tokens of a context that one program reads
LEAST = 16  # of each dimension of a product
LOG2_E = log2(e)
# What differs from step to step: nothing is compiled anew for it while requests wait.
VARYING, TABLES = ("splits", "table_row"), ("context", "table")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=TABLES)
def _split(
    q, k_pages, v_pages, k_scales, v_scales, table, context, partial, partial_lse, scale, splits,
    page_stride, token_stride, head_stride, scale_page, scale_token, scale_head, table_row,
    group: tl.constexpr, padded_group: tl.constexpr, head_dim: tl.constexpr,
    padded_dim: tl.constexpr, page_tokens: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr, is_quantized: tl.constexpr, is_wide: tl.constexpr,
):  # fmt: skip
    """One request, KV head and split: the group's heads are rows, padded with rows of nobody."""
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    begin = split * split_tokens
    end = tl.minimum(tl.load(context + request), begin + split_tokens)
    if begin < end:
        rows, dims = tl.arange(0, padded_group), tl.arange(0, padded_dim)
        has_row, has_dim = rows < group, dims < head_dim
        heads = (request * tl.num_programs(1) + kv_head) * group + rows
        cells = has_row[:, None] & has_dim[None, :]
        query = tl.load(q + heads[:, None] * head_dim + dims[None, :], cells, 0.0)
        if is_wide:
            query = query.to(tl.float32)
        best = tl.full([padded_group], float("-inf"), tl.float32)
        total = tl.zeros([padded_group], tl.float32)
        mixed = tl.zeros([padded_group, padded_dim], tl.float32)
        for at in range(begin, end, tile):
            keys = at + tl.arange(0, tile)
            has_key = keys < end
            row = table + request * table_row
            page = tl.load(row + keys // page_tokens, has_key, 0).to(tl.int64)
            token = keys % page_tokens
            where = page * page_stride + token * token_stride + kv_head * head_stride
            where = where[:, None] + dims[None, :]
            inside = has_key[:, None] & has_dim[None, :]
            k = tl.load(k_pages + where, inside, 0.0).to(query.dtype)
            v = tl.load(v_pages + where, inside, 0.0).to(query.dtype)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            units = page * scale_page + token * scale_token + kv_head * scale_head
            if is_quantized:
                scores *= tl.load(k_scales + units, has_key, 0.0)[None, :]
            scores = tl.where(has_key[None, :], scores, float("-inf"))
            most = tl.maximum(best, tl.max(scores, 1))
            weights, kept = tl.exp2(scores - most[:, None]), tl.exp2(best - most)
            total = total * kept + tl.sum(weights, 1)
            if is_quantized:
                weights *= tl.load(v_scales + units, has_key, 0.0)[None, :]
            product = tl.dot(weights.to(query.dtype), v, input_precision="ieee")
            mixed = mixed * kept[:, None] + product
            best = most
        slots = heads * splits + split
        tl.store(partial_lse + slots, best + tl.log2(total), has_row)
        parts = partial + slots[:, None] * head_dim + dims[None, :]
        tl.store(parts, mixed / total[:, None], cells)


@triton.jit(do_not_specialize=VARYING[:1], do_not_specialize_on_alignment=TABLES[:1])
def _merge(
    partial, partial_lse, context, out, splits,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, split_tokens: tl.constexpr,
):  # fmt: skip
    """One head of one request: its splits' results; zeros where it has no token."""
    request = tl.program_id(0).to(tl.int64)
    head = request * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, padded_dim)
    has_dim = dims < head_dim
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([padded_dim], tl.float32)
    for split in range(tl.cdiv(tl.load(context + request), split_tokens)):
        slot = head * splits + split
        lse = tl.load(partial_lse + slot)
        most = tl.maximum(best, lse)
        kept, weight = tl.exp2(best - most), tl.exp2(lse - most)
        part = tl.load(partial + slot * head_dim + dims, has_dim, 0.0)
        mixed = mixed * kept + part * weight
        total = total * kept + weight
        best = most
    made = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + head * head_dim + dims, made.to(out.dtype.element_ty), has_dim)


def unsupported(dtype: torch.dtype, stored: torch.dtype) -> str:
    """Why a model of `dtype` with pages of `stored` is not decoded here; empty: it is."""
    if dtype not in DTYPES:
        return f"dtype {dtype} (the Triton kernel has bfloat16, float16 and float32)"
    if stored not in (dtype, torch.int8):
        return f"pages of {stored} (the Triton kernel has the model's dtype and int8)"
    return ""


def triton_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    context_tokens: torch.Tensor,
    scale: float,
    longest: int,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Attention of one row a request, `q` [R, heads, head_dim], over its own tokens; q's shape.

    Pages [page, token, KV head, dim] and scales are those of `shared_decode`, of any size;
    `context_tokens` int[R] may be 0, which gives zeros, and is at most `longest` and what
    int32 `page_table` [R, pages] holds. Nothing is read on the host, so a CUDA graph can hold it.
    """
    requests, heads, head_dim = q.shape
    page_tokens, kv_heads = k_pages.shape[1:3]
    if k_pages.stride() != v_pages.stride() or k_pages.stride(3) != 1:
        raise ValueError("k_pages and v_pages need equal strides, and dimensions side by side")
    splits, group = max(1, -(-longest // SPLIT)), heads // kv_heads
    sizes, wide = (requests, heads, splits), torch.float32
    partial = torch.empty(*sizes, head_dim, dtype=wide, device=q.device)
    partial_lse = torch.empty(sizes, dtype=wide, device=q.device)
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_scales, v_scales = scales
    factors = (0, 0, 0) if k_scales is None else k_scales.stride()
    dims = max(LEAST, triton.next_power_of_2(head_dim))
    is_wide = q.dtype == torch.float32 or not q.is_cuda  # the interpreter has no bfloat16 products
    _split[(requests, kv_heads, splits)](
        *(q, k_pages, v_pages, k_scales, v_scales, page_table, context_tokens),
        *(partial, partial_lse, scale * LOG2_E, splits),
        *(*k_pages.stride()[:3], *factors, page_table.stride(0)),
        group=group, padded_group=max(LEAST, triton.next_power_of_2(group)),
        head_dim=head_dim, padded_dim=dims, page_tokens=page_tokens,
        tile=32 if is_wide else 64, split_tokens=SPLIT,
        is_quantized=k_scales is not None, is_wide=is_wide,
    )  # fmt: skip
    _merge[(requests, heads)](
        partial, partial_lse, context_tokens, out, splits,
        head_dim=head_dim, padded_dim=dims, split_tokens=SPLIT,
    )  # fmt: skip
    return out
