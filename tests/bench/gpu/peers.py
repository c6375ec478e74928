"""Other implementations of attention on the same numbers and page tables, each in its own process.

FlashInfer gets pages in its own order, dense. torch's SDPA and flex_attention have no pages: their
inputs are gathered first, and that time is reported separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.bench.gpu.cases import Attention, Case, Linear
from tests.bench.gpu.ours import Batch, batch_of
from tests.bench.gpu.timing import Run

WORKSPACE_BYTES = 256 << 20
Peer = Callable[[Batch], Run]


def _starts(count: int, step: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * step


def _last_page(batch: Batch, rows: int) -> torch.Tensor:
    left = (batch.shape.context - 1) % batch.shape.page + 1
    return torch.full((rows,), left, dtype=torch.int32, device="cuda")


@cache
def _workspace() -> torch.Tensor:
    """Return one workspace, which all inputs use in turn."""
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
    """Return a function that runs FlashInfer's cascade with two levels: the shared prefix, then
    each request's own context.
    """
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
    """Return K and V as [request, kv head, token, dim] without pages."""
    table = batch.table.long()
    k, v = (x[table].flatten(1, 2)[:, : batch.shape.context] for x in (batch.k, batch.v))
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _queries(batch: Batch) -> torch.Tensor:
    """Return the batch's queries as [request, head, query, dim]."""
    shape = batch.shape
    return batch.q.view(shape.requests, shape.new, shape.heads, shape.dim).transpose(1, 2)


def sdpa(batch: Batch, backend: str = "") -> Run:
    """Return a function that runs torch's SDPA with its default backend, or with the named one of
    `SDPBackend`.
    """
    module = import_module("torch.nn.attention")
    bias = import_module("torch.nn.attention.bias")
    k, v = gather(batch)
    q, mask, is_causal = _queries(batch).contiguous(), None, False
    new, context = batch.shape.new, batch.shape.context
    if new == context:
        is_causal = True  # every backend has causal masks
    elif new > 1 and backend:  # a causal bias would make torch choose FlashAttention
        sees = torch.ones(new, context, dtype=torch.bool, device="cuda").tril(context - new)
        mask = torch.zeros(new, context, dtype=q.dtype, device="cuda")
        mask.masked_fill_(~sees, float("-inf"))
    elif new > 1:
        mask = bias.causal_lower_right(new, context)

    def run() -> torch.Tensor:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )

    def run_named() -> torch.Tensor:
        with module.sdpa_kernel(getattr(module.SDPBackend, backend)):
            return run()

    return run_named if backend else run


def cudnn(batch: Batch) -> Run:
    """Return a function that runs SDPA with cuDNN, the backend to compare prefill on
    Hopper with.
    """
    return sdpa(batch, "CUDNN_ATTENTION")


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    """Return one compiled flex_attention for all inputs; it compiles for each shape, for most of a
    minute.
    """
    module = import_module("torch.nn.attention.flex_attention")
    return torch.compile(module.flex_attention)


def flex(batch: Batch) -> Run:
    module = import_module("torch.nn.attention.flex_attention")
    k, v = gather(batch)
    q, mask = _queries(batch).contiguous(), None
    if batch.shape.new > 1:
        before = batch.shape.context - batch.shape.new

        def sees(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query + before >= key

        mask = module.create_block_mask(sees, None, None, q.shape[2], k.shape[2])
    attend = _compiled_flex()
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)


def gathering(batch: Batch) -> Run:
    """Return a function that gathers K and V as SDPA and flex_attention need them in each layer of
    each step.
    """
    return lambda: gather(batch)


PEERS: dict[str, dict[str, Peer]] = {  # in the order in which they are measured
    "decode": {
        "sdpa": sdpa,
        "gather": gathering,
        "flashinfer": flashinfer_decode,
        "flex": flex,
    },
    "prefill": {
        "cudnn": cudnn,
        "sdpa": sdpa,
        "gather": gathering,
        "flashinfer": flashinfer_prefill,
        "flex": flex,
    },
    "shared": {
        "flashinfer": flashinfer_cascade,
        "flashinfer_decode": flashinfer_decode,
    },
}


# cuDNN is first, since prefill's bounds refer to it; peers that compile for long are last.
ORDER = (
    *("torch_bf16", "cudnn", "sdpa", "gather"),
    *("flashinfer", "flashinfer_decode", "flex"),
)


def linear_peer(shape: Linear, seed: int) -> Run:
    """Return a function that runs torch's matrix product with unquantized weights."""
    torch.manual_seed(seed)
    x = torch.randn(shape.rows, shape.inputs, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(shape.channels, shape.inputs, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.nn.functional.linear(x, w)


def names_of(case: Case) -> tuple[str, ...]:
    """Return the names of other implementations to compare a case with.

    Cases of quantized pages have none, and of our two prefill kernels only one is compared.
    """
    if isinstance(case.shape, Linear):
        return ("torch_bf16",)
    if not isinstance(case.shape, Attention) or case.shape.stored != "bfloat16":
        return ()
    if case.kernel == "prefill_mma" or case.name.endswith("plain"):
        return ()
    return tuple(PEERS.get(case.kernel.partition("_")[0], {}))


def run_of(case: Case, peer: str, seed: int) -> Run:
    """Return a function that runs `peer` on the case's input of this seed. Raises the peer's own
    errors.
    """
    if isinstance(case.shape, Linear):
        return linear_peer(case.shape, seed)
    assert isinstance(case.shape, Attention)
    batch = batch_of(case.shape, seed)
    return PEERS[case.kernel.partition("_")[0]][peer](batch)
