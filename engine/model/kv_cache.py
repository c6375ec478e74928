"""The paged KV cache of one worker: one tensor, reached through strides, quantized or not.

Physical order is (block, head, layer, K or V, token, dim): one block of one head is one run of
bytes over all layers, so that a transfer to a worker with other shards copies whole runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.config import KV_ALIGNMENT_BYTES, ModelConfig, ModelError, Shard

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


class LayerKv(NamedTuple):
    """One layer's K and V, views [block, token, head, dim]; the last block is scratch."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None  # [block, token, head] where the cache is quantized
    v_scales: torch.Tensor | None = None


class KvCache:
    """KV of `blocks` blocks of `block_size` tokens, for one shard. Lifetime: worker.

    One block more than asked for takes what padding writes, so that slot -1 needs no branch.
    `kv` auto keeps K and V in `dtype`, int8 and fp8 in a byte an element with a scale per token and
    head. Raises ValueError for no blocks, ModelError for what `kv` cannot do here.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: Shard | None = None,
        kv: str = "auto",
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens are no cache")
        shard = shard or Shard()
        heads = shard.kv_heads(config.kv_heads)
        own_layers = len(shard.layers(config.layers))
        self.blocks, self.block_size = blocks, block_size
        shape = (blocks + 1, heads.stop - heads.start, own_layers, 2, block_size)
        storage = kv_storage(config, kv, device, dtype)
        # Zeros: what was never written is masked, but must not be NaN.
        self.pool = torch.zeros((*shape, config.head_dim), dtype=storage, device=device)
        self.scales = torch.zeros(shape, dtype=SCALES, device=device) if kv != "auto" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and its scales, the scratch block included."""
        return self.pool.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def layer(self, number: int) -> LayerKv:
        """K and V of the shard's layer `number`, counted from the shard's first."""
        both = self.pool[:, :, number]
        k, v = both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)
        if self.scales is None:
            return LayerKv(k, v)
        scales = self.scales[:, :, number]
        return LayerKv(k, v, scales[:, :, 0].transpose(1, 2), scales[:, :, 1].transpose(1, 2))
