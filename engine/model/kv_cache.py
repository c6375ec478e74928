"""The paged KV cache of one worker: one tensor, reached through strides.

Physical order is (block, head, layer, K or V, token, dim): one block of one head is one run of
bytes over all layers, so that a transfer to a worker with other shards copies whole runs.
A quantized cache has the same order in bytes, and its scales in a side array of that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.model.config import ModelConfig
from engine.model.kv_quant import SCALES, kv_storage
from engine.model.shard import Shard


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
