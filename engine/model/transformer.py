"""The transformer of Llama, Qwen2 and Qwen3: it takes a flat batch, returns logits, and writes KV
into the batch's pages.

Names of tensors and the order of operations follow transformers 5.23 (`modeling_llama.py`,
`modeling_qwen2.py`, `modeling_qwen3.py`), with which the tests compare it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.model.attention import Attention, StepAttention, TorchAttention
from engine.model.backends import FellBack
from engine.model.batch import FlatBatch
from engine.model.checkpoint import Checkpoint, Weights, part_of, rows_of
from engine.model.config import EMBEDDING, HEAD, NORM, PLAIN, ModelConfig, Quantization, Shard
from engine.model.kv_cache import KvCache, LayerKv
from engine.model.layers import (
    Alone,
    HeadNorms,
    Int8Kernel,
    Linear,
    Ranks,
    RowParallel,
    is_exact,
    rms_norm,
)
from engine.model.rope import Rotary


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x); on CPUs computed so that a number's bits do not depend on its
    position.
    """
    return x / (1 + (-x).exp()) if is_exact(x) else functional.silu(x)


def _named(parts: list[tuple[str, slice]], suffix: str) -> list[tuple[str, slice]]:
    return [(name + suffix, rows) for name, rows in parts]


class Layer:
    """One decoder layer of one shard. Lifetime: model."""

    def __init__(
        self, config: ModelConfig, weights: Weights, number: int, shard: Shard, ranks: Ranks
    ) -> None:
        dim, prefix = config.head_dim, f"model.layers.{number}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        heads, kv_heads = shard.part(config.heads), shard.kv_heads(config.kv_heads)
        q = slice(heads.start * dim, heads.stop * dim)
        kv = slice(kv_heads.start * dim, kv_heads.stop * dim)
        wide = shard.part(config.intermediate_size)
        qkv = [(f"{attention}q_proj", q), (f"{attention}k_proj", kv), (f"{attention}v_proj", kv)]
        gate_up = [(f"{mlp}gate_proj", wide), (f"{mlp}up_proj", wide)]
        vector, matrix, joined = weights.vector, weights.matrix, weights.joined
        self._eps, self._dim = config.norm_eps, dim
        self._heads, self._kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        self._before = vector(f"{prefix}input_layernorm.weight")
        self._between = vector(f"{prefix}post_attention_layernorm.weight")
        self._qkv = Linear(
            weights.matrices(_named(qkv, ".weight")),
            joined(_named(qkv, ".bias")) if config.qkv_bias else None,
        )
        self._norms = HeadNorms(
            vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            config.norm_eps,
        )
        self._o = RowParallel(
            matrix(f"{attention}o_proj.weight", None, q),
            vector(f"{attention}o_proj.bias") if config.o_bias else None,
            ranks,
        )
        self._gate_up = Linear(
            weights.matrices(_named(gate_up, ".weight")),
            joined(_named(gate_up, ".bias")) if config.mlp_bias else None,
        )
        self._down = RowParallel(
            matrix(f"{mlp}down_proj.weight", None, wide),
            vector(f"{mlp}down_proj.bias") if config.mlp_bias else None,
            ranks,
        )

    def __call__(self, x: torch.Tensor, attention: StepAttention, kv: LayerKv) -> torch.Tensor:
        """Return the layer's output for x [T, hidden], in the same shape; the batch's K and V are
        written to `kv`.
        """
        x = x + self._attention(rms_norm(x, self._before, self._eps), attention, kv)
        gate, up = self._gate_up(rms_norm(x, self._between, self._eps)).chunk(2, dim=-1)
        return x + self._down(silu(gate.contiguous()) * up)

    def _attention(self, x: torch.Tensor, attention: StepAttention, kv: LayerKv) -> torch.Tensor:
        both = self._heads + self._kv_heads
        qkv = self._qkv(x).view(x.shape[0], both + self._kv_heads, self._dim)
        q, k, v = torch.split(qkv, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        return self._o(attention(q, k, v, self._norms, kv).flatten(1))


class Transformer:
    """One shard of a model on one device.

    Lifetime: worker; it holds weights and no state of requests. `max_tokens` bounds positions; it
    is at most, and by default, the model's max_positions, and may exceed it for dynamic scaling.
    `quantization` says which weights are stored as INT8, `attention` computes attention, and
    `int8_kernel` says whether few rows are multiplied by INT8 weights as they are stored. Raises
    ModelError for a checkpoint that does not fit the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: Shard | None = None,
        ranks: Ranks | None = None,
        max_tokens: int | None = None,
        quantization: Quantization = PLAIN,
        attention: Attention | None = None,
        int8_kernel: bool = False,
    ) -> None:
        shard, ranks = shard or Shard(), ranks or Alone()
        self._int8 = Int8Kernel() if int8_kernel else None
        weights = Weights(config, checkpoint, device, dtype, shard, quantization, self._int8)
        self.config, self.shard, self.device, self.dtype = config, shard, device, dtype
        self.max_tokens = max_tokens or config.max_positions
        self._ranks = ranks
        self._attention = attention or TorchAttention()
        self._rotary = Rotary(config.rope, config.head_dim, self.max_tokens, device, dtype)
        self._embedding = weights.matrix(EMBEDDING) if shard.is_first else None
        self._layers = [
            Layer(config, weights, number, shard, ranks) for number in shard.layers(config.layers)
        ]
        # The last layer is cut by words where they can be shared out equally.
        self._is_cut = shard.tp_size > 1 and config.vocab % shard.tp_size == 0
        if shard.is_last:
            words = shard.part(config.vocab) if self._is_cut else None
            self._norm = weights.vector(NORM)
            if config.is_tied and self._embedding is not None:
                head = part_of(self._embedding, words or slice(None))
            else:
                head = weights.matrix(EMBEDDING if config.is_tied else HEAD, words)
            self._head = Linear(head)
        self.weights_bytes = weights.bytes_read

    @property
    def fell_back(self) -> FellBack:
        """The parts that torch computes in place of failed kernels, and why."""
        whys = {"attention": self._attention.fell_back, "int8": self._int8 and self._int8.fell_back}
        return {part: why for part, why in whys.items() if why}

    @torch.inference_mode()
    def forward(
        self, batch: FlatBatch, kv: KvCache, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [S, vocab] of the batch's sample rows, float32 (float64 in float64
        models).

        A stage before the last returns hidden states [T, hidden size] instead, and one after the
        first takes them as `hidden`. Positions must be below `max_tokens`, ids below the
        vocabulary's size.
        """
        if self._embedding is not None:
            x = rows_of(self._embedding, batch.token_ids)
        elif hidden is None:
            raise ValueError(f"stage {self.shard.pp_rank} needs the hidden states before it")
        else:
            x = hidden
        attention = self._attention.begin(batch, self._rotary)
        for number, layer in enumerate(self._layers):
            x = layer(x, attention, kv.layer(number))
        if not self.shard.is_last:
            return x
        rows = rms_norm(x[batch.sample_rows], self._norm, self.config.norm_eps)
        logits = self._head(rows)
        if self._is_cut:
            logits = self._ranks.gather(logits)
        return logits if logits.dtype == torch.float64 else logits.float()
