"""A checkpoint's tensors under their names, checked, and cut to one shard's parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.int8 import Int8Weight, read_rows
from engine.model.names import EMBEDDING, HEAD, NORM
from engine.model.quantization import PLAIN, Quantization
from engine.model.shard import Shard

Matrix = torch.Tensor | Int8Weight


def expected(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and whole shape of every tensor that the shard reads a part of."""
    if shard.is_first or (shard.is_last and config.is_tied):
        yield EMBEDDING, (config.vocab, config.hidden_size)
    if shard.is_last:
        yield NORM, (config.hidden_size,)
        if not config.is_tied:
            yield HEAD, (config.vocab, config.hidden_size)
    for layer in shard.layers(config.layers):
        yield from _of_layer(config, layer)


def _of_layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    prefix = f"model.layers.{layer}."
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    for name, outputs, inputs, has_bias in (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    ):
        yield f"{prefix}{name}.weight", (outputs, inputs)
        if has_bias:
            yield f"{prefix}{name}.bias", (outputs,)
    if config.qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)


def rows_of(matrix: Matrix, which: torch.Tensor) -> torch.Tensor:
    """Those rows as numbers: the embedding of ids."""
    return matrix.rows(which) if isinstance(matrix, Int8Weight) else matrix[which]


def part_of(matrix: Matrix, rows: slice) -> Matrix:
    """Those rows; shares memory."""
    return matrix.part(rows) if isinstance(matrix, Int8Weight) else matrix[rows]


class Weights:
    """Reads one shard's parts onto its device. Lifetime: while a model loads.

    Raises ModelError at once for any tensor that is missing or of another shape or dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: str,
        dtype: torch.dtype,
        shard: Shard,
        quantization: Quantization = PLAIN,
        int8_kernel: bool = False,
    ) -> None:
        config.check_shard(shard)
        for name, shape in expected(config, shard):
            checkpoint.check(name, shape)
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._quantization, self._int8_kernel = quantization, int8_kernel
        self.bytes_read = 0  # as they are kept

    def vector(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A one-dimensional tensor, or `rows` of it."""
        return self._counted(self._checkpoint.tensor(name, rows).to(self._device, self._dtype))

    def matrix(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Matrix:
        """A matrix, or those rows and columns of it."""
        if self._quantization.covers(name):
            return self._int8([(name, rows or slice(None))], columns)
        found = self._checkpoint.tensor(name, rows, columns)
        return self._counted(found.to(self._device, self._dtype).contiguous())

    def matrices(self, names: list[tuple[str, slice]]) -> Matrix:
        """Rows of several matrices of one width, one below the other."""
        if self._quantization.covers(names[0][0]):
            return self._int8(names)
        return self.joined(names)

    def joined(self, names: list[tuple[str, slice]]) -> torch.Tensor:
        """Rows of several tensors, one below the other, made in place."""
        parts = [self._checkpoint.tensor(name, rows) for name, rows in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        at = 0
        for part in parts:
            whole[at : at + part.shape[0]] = part
            at += part.shape[0]
        return self._counted(whole)

    def _int8(self, names: list[tuple[str, slice]], columns: slice | None = None) -> Int8Weight:
        """Rows of several matrices, one below the other, in integers; the same in every shard."""
        made = []
        for name, rows in names:
            outputs, inputs = self._checkpoint.info(name).shape
            first, last, _ = rows.indices(outputs)
            made.append(
                read_rows(
                    partial(self._checkpoint.tensor, name), slice(first, last), inputs, columns
                )
            )
        q, scales = (torch.cat(parts) for parts in zip(*made, strict=True))
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return Int8Weight(
            self._counted(q.to(self._device)),
            self._counted(scales.to(self._device, wide)),
            self._dtype,
            self._int8_kernel,
        )

    def _counted(self, kept: torch.Tensor) -> torch.Tensor:
        self.bytes_read += kept.nbytes
        return kept
