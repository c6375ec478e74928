"""What ours is compared with in the same run, on the same numbers and page tables.

FlashInfer gets pages in its own order, dense. torch's SDPA and flex_attention have no pages: theirs
are gathered first, and the time that takes is told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.bench.gpu.ours import Batch
from tests.bench.gpu.timing import Run

WORKSPACE_BYTES = 256 << 20
Peer = Callable[[Batch], Run]
FAILURES = (ImportError, RuntimeError, TypeError, ValueError, AttributeError, OSError)


def _starts(count: int, step: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * step


def _last_page(batch: Batch, rows: int) -> torch.Tensor:
    left = (batch.shape.context - 1) % batch.shape.page + 1
    return torch.full((rows,), left, dtype=torch.int32, device="cuda")


def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def flashinfer_decode(batch: Batch) -> Run:
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True
    )
    shape, pages = batch.shape, (batch.k.contiguous(), batch.v.contiguous())
    wrapper.plan(
        *(_starts(shape.requests, batch.table.shape[1]), batch.table.flatten().contiguous()),
        *(_last_page(batch, shape.requests), shape.heads, shape.kv_heads, shape.dim, shape.page),
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
    )
    return lambda: wrapper.run(batch.q, pages)


def flashinfer_prefill(batch: Batch) -> Run:
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    shape, pages = batch.shape, (batch.k.contiguous(), batch.v.contiguous())
    wrapper.plan(
        *(_starts(shape.requests, shape.new), _starts(shape.requests, batch.table.shape[1])),
        *(batch.table.flatten().contiguous(), _last_page(batch, shape.requests)),
        *(shape.heads, shape.kv_heads, shape.dim, shape.page),
        causal=True,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
    )
    return lambda: wrapper.run(batch.q, pages)


def flashinfer_cascade(batch: Batch) -> Run:
    """Two levels: the prefix for all, then what each has of its own."""
    wrapper = import_module("flashinfer").MultiLevelCascadeAttentionWrapper(2, _workspace(), "NHD")
    shape, common = batch.shape, batch.shape.prefix // batch.shape.page
    pages = (batch.k.contiguous(), batch.v.contiguous())
    own = batch.table[:, common:].contiguous()
    whole = torch.full((1,), shape.page, dtype=torch.int32, device="cuda")
    wrapper.plan(
        [_starts(1, shape.requests), _starts(shape.requests, 1)],
        [_starts(1, common), _starts(shape.requests, own.shape[1])],
        [batch.table[0, :common].contiguous(), own.flatten()],
        [whole, _last_page(batch, shape.requests)],
        *(shape.heads, shape.kv_heads, shape.dim, shape.page),
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
    )
    return lambda: wrapper.run(batch.q, pages)


def gather(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [request, kv head, token, dim] without pages."""
    table = batch.table.long()
    k, v = (x[table].flatten(1, 2)[:, : batch.shape.context] for x in (batch.k, batch.v))
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _queries(batch: Batch) -> torch.Tensor:
    """[request, head, query, dim]."""
    shape = batch.shape
    return batch.q.view(shape.requests, shape.new, shape.heads, shape.dim).transpose(1, 2)


def sdpa(batch: Batch) -> Run:
    bias = import_module("torch.nn.attention.bias")
    k, v = gather(batch)
    q, mask = _queries(batch).contiguous(), None
    if batch.shape.new > 1:
        mask = bias.causal_lower_right(batch.shape.new, batch.shape.context)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def flex(batch: Batch) -> Run:
    module = import_module("torch.nn.attention.flex_attention")
    k, v = gather(batch)
    q, mask = _queries(batch).contiguous(), None
    if batch.shape.new > 1:
        before = batch.shape.context - batch.shape.new

        def sees(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query + before >= key

        mask = module.create_block_mask(sees, None, None, q.shape[2], k.shape[2])
    attend = torch.compile(module.flex_attention)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)


def gathering(batch: Batch) -> Run:
    """What SDPA and flex_attention need beforehand, for each layer of each step."""
    return lambda: gather(batch)


PEERS: dict[str, dict[str, Peer]] = {
    "decode": {"flashinfer": flashinfer_decode, "sdpa": sdpa, "flex": flex, "gather": gathering},
    "prefill": {"flashinfer": flashinfer_prefill, "sdpa": sdpa, "flex": flex, "gather": gathering},
    "shared": {"flashinfer": flashinfer_cascade, "flashinfer_decode": flashinfer_decode},
}


def runs_of(kernel: str, batches: list[Batch]) -> Iterator[tuple[str, list[Run] | str]]:
    """Each peer's name and its runs, or why it has none. Quantized pages have no peer here."""
    for name, make in PEERS.get(kernel, {}).items():
        if batches[0].k_scales is not None:
            continue
        try:
            yield name, [make(batch) for batch in batches]
        except FAILURES as error:
            yield name, f"{name}: {type(error).__name__}: {error!s:.120}"
