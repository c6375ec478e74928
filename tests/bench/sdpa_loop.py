"""The engine's baseline: the same model as a plain loop on torch's SDPA.

It follows nano-vllm (GeeeekExplorer, 2025) without its CUDA kernels: all requests are there at the
start, prompts of one length are computed together, every step gives each request one token, and the
cache is one tensor a layer. Nothing is shared, scheduled, streamed or sampled.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.model.checkpoint import Checkpoint
from engine.model.config import EMBEDDING, HEAD, NORM, ModelConfig
from engine.model.rope import Rotary


class SdpaLoop:
    """Llama's layers on contiguous caches, with matrices in the order of rows of their checkpoint.
    Lifetime: run.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype
    ) -> None:
        self._config, self._device = config, device

        def read(name: str) -> torch.Tensor:
            return checkpoint.tensor(name).to(device, dtype)

        self._embedding, self._norm = read(EMBEDDING), read(NORM)
        self._head = self._embedding if config.is_tied else read(HEAD)
        self._layers = []
        for number in range(config.layers):
            prefix = f"model.layers.{number}."
            qkv = [read(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
            wide = [read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
            names = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")
            rest = [read(f"{prefix}{name}.weight") for name in (*names, "mlp.down_proj")]
            self._layers.append((torch.cat(qkv), torch.cat(wide), *rest))
        self._rotary = Rotary(config.rope, config.head_dim, config.max_positions, device, dtype)

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the likeliest `tokens` tokens after each prompt: int64[R, P] -> int64[R,
        tokens].
        """
        config = self._config
        requests, length = prompts.shape
        shape = (2, requests, config.kv_heads, length + tokens, config.head_dim)
        dtype = self._embedding.dtype
        caches = [torch.zeros(shape, device=self._device, dtype=dtype) for _ in self._layers]
        said = torch.empty((requests, tokens), dtype=torch.int64, device=self._device)
        now, start = prompts.to(self._device), 0
        for step in range(tokens):
            said[:, step] = self._step(now, start, caches).argmax(-1)
            start += now.shape[1]
            now = said[:, step : step + 1]
        return said.cpu()

    def _step(self, ids: torch.Tensor, start: int, caches: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits after the last of `ids`, whose positions begin at `start`."""
        config = self._config
        shape = (*ids.shape, -1, config.head_dim)
        parts = (config.heads, config.kv_heads, config.kv_heads)
        end = start + ids.shape[1]
        cos, sin = self._rotary.cos[start:end, None], self._rotary.sin[start:end, None]
        x = self._embedding[ids]
        for (qkv, wide, before, between, out, down), cache in zip(
            self._layers, caches, strict=True
        ):
            made = functional.linear(self._normed(x, before), qkv).view(shape)
            q, k, v = made.split(parts, dim=2)
            cache[0, :, :, start:end] = _rotated(k, cos, sin).transpose(1, 2)
            cache[1, :, :, start:end] = v.transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                _rotated(q, cos, sin).transpose(1, 2),
                cache[0, :, :, :end],
                cache[1, :, :, :end],
                is_causal=start == 0,
                enable_gqa=True,
            )
            x = x + functional.linear(attended.transpose(1, 2).flatten(2), out)
            gate, up = functional.linear(self._normed(x, between), wide).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self._normed(x[:, -1], self._norm), self._head)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.norm_eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
