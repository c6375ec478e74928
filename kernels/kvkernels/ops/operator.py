"""Turns a kernel into a torch operator, and says which dtypes, heads and pages the kernels support.

The arguments of an operator have the order of the kernel's C entry point. All operators write to
tensors that they are given and return nothing: an operator allocates nothing, so that a CUDA graph
can contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from kvkernels.cuda import library as build
from kvkernels.cuda.library import KernelLibrary

HEAD_DIMS, PAGE_STEP = (64, 128), 16
DTYPES = (torch.bfloat16, torch.float16)


def unsupported_dtype(dtype: torch.dtype) -> str:
    """Return the reason why no kernel computes in `dtype`; "" if all kernels do."""
    return "" if dtype in DTYPES else f"dtype {dtype} (the kernel has bfloat16 and float16)"


def unsupported_head(head_dim: int) -> str:
    """Return the reason why no attention kernel supports this head_dim; "" if all do."""
    return "" if head_dim in HEAD_DIMS else f"head_dim {head_dim} (the kernel has 64 and 128)"


def unsupported_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    most_group: int,
) -> str:
    """Return the reason why a kernel whose groups have up to `most_group` heads does not support
    this shape; "" if it supports it.
    """
    if why := unsupported_dtype(dtype) or unsupported_head(head_dim):
        return why
    if page_tokens % PAGE_STEP:
        return f"block_size {page_tokens} (the kernel has multiples of {PAGE_STEP})"
    if heads % kv_heads or heads // kv_heads > most_group:
        return f"{heads} heads for {kv_heads} KV heads (the kernel has groups of 1 to {most_group})"
    return ""


def check_table(
    context_tokens: torch.Tensor, page_table: torch.Tensor, pages: int, page_tokens: int
) -> None:
    """Raise ValueError, with row and column, unless `page_table` int[R, most pages] names pages,
    each below `pages`, for all of `context_tokens` int[R]. Both are on the CPU.
    """
    if context_tokens.dim() != 1 or page_table.dim() != 2 or len(page_table) != len(context_tokens):
        raise ValueError(
            f"{list(context_tokens.shape)} context tokens and a page_table of "
            f"{list(page_table.shape)}: needs [requests] and [requests, pages]"
        )
    wide = page_table.shape[1] * page_tokens
    for row in ((context_tokens < 0) | (context_tokens > wide)).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"request {row} has {int(context_tokens[row])} context tokens, its row of page_table "
            f"is for 0 to {wide}"
        )
    cells = page_table.numpy()  # whose minimum is several times faster than torch's
    if cells.size == 0 or (cells.min() >= 0 and cells.max() < pages):
        return  # the rest is a hundred times slower
    used = torch.arange(page_table.shape[1]) * page_tokens < context_tokens[:, None]
    bad = used & ((page_table < 0) | (page_table >= pages))
    for row, column in bad.nonzero().tolist()[:1]:
        raise ValueError(
            f"page_table[{row}, {column}] is {int(page_table[row, column])}, "
            f"pages go from 0 to {pages - 1}"
        )


def tokens_of(
    kept: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    pages: torch.Tensor,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [tokens, head, dim] of these pages as numbers in `wide`, dequantized if they
    were quantized.
    """
    k, v = (
        _numbers(x, factors, pages, wide).flatten(0, 1)
        for x, factors in zip(kept, scales, strict=True)
    )
    return k, v


def _numbers(
    kept: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    if scales is None:
        return kept[pages].to(wide)
    # As bytes: torch cannot index FP8.
    units = kept.view(torch.uint8)[pages].view(kept.dtype)
    return units.to(wide) * scales[pages].to(wide)[..., None]


NAMESPACE = "warmroute"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@cache
def cuda_library() -> KernelLibrary:
    """Return the library for GPUs, and build it if it does not exist. Raises library.BuildError."""
    return KernelLibrary(build.find_cuda() or build.build())


def define(name: str, on_cpu: Callable[..., None], written: Sequence[str]) -> None:
    """Define the torch operator `warmroute::name`.

    On CPUs it calls `on_cpu`, whose signature is the operator's schema; `written` names the
    arguments that it writes to. On CUDA devices it runs `wr_name` on the current stream with the
    same arguments in order.
    """
    schema = torch.library.infer_schema(on_cpu, mutates_args=written)
    LIBRARY.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, partial(_on_cuda, name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", _nothing, lib=LIBRARY)


def _on_cuda(name: str, *arguments: Any) -> None:
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        cuda_library().call(name, arguments, stream)


def _nothing(*_: Any) -> None:
    """Do nothing when torch traces an operator, whose outputs are arguments."""
