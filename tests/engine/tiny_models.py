"""Writes tiny checkpoints to disk, and computes their logits by our model and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from engine.model.batch import Piece, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import PLAIN, Quantization, read_config
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings, make_tiny
from engine.model.transformer import Transformer


def written(directory: Path, settings: TinySettings) -> Path:
    """Write the checkpoint of `settings` into a new folder below `directory`; return the folder."""
    folder = directory / "model"
    make_tiny(folder, settings)
    return folder


def loaded(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    max_tokens: int | None = None,
    quantization: Quantization = PLAIN,
) -> Transformer:
    """Load our model of the checkpoint in `folder`."""
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        return Transformer(
            config, checkpoint, dtype=dtype, max_tokens=max_tokens, quantization=quantization
        )


def cache(model: Transformer, blocks: int = 64, block_size: int = 16, kv: str = "auto") -> KvCache:
    return KvCache(model.config, blocks, block_size, dtype=model.dtype, kv=kv)


def full_logits(model: Transformer, ids: Sequence[int], kv_dtype: str = "auto") -> torch.Tensor:
    """Return the logits [tokens, vocab] of `ids`, computed in one step with blocks from the cache's
    end.
    """
    kv = cache(model, len(ids) // 16 + 1, kv=kv_dtype)
    blocks = list(reversed(range(kv.blocks)))
    return model.forward(flat_batch([Piece(ids, 0, blocks, wants_all=True)], 16), kv)


def oracle(folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the logits [tokens, vocab] of `ids`, computed by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def some_ids(count: int, vocab: int = 264) -> list[int]:
    """Return ids that look random and are always the same."""
    return [(at * at * 7 + at * 31 + 3) % vocab for at in range(count)]
