"""Reads weights from safetensors shards: it checks them, finds them by name, and cuts them to the
parts of one shard of the model.

The format is that of huggingface/safetensors 0.8 (8 bytes of header length, little-endian, a JSON
header, raw data); `model.safetensors.index.json` names the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from engine.model.config import (
    AGAIN,
    EMBEDDING,
    HEAD,
    NORM,
    PLAIN,
    ModelConfig,
    ModelError,
    Quantization,
    Shard,
    read_object,
)
from engine.model.layers import Int8Kernel, Int8Weight, read_rows

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_SHARDS = 4096
DTYPES = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)
_PLAIN_NAME = re.compile(r"[\w.\-]+\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor in a file, and its entry in the header."""

    path: Path
    dtype: str  # as safetensors writes it: BF16, F32 ...
    shape: tuple[int, ...]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Checkpoint:
    """The tensors of a model directory. Lifetime: while a model loads; close it, or use `with`.

    Raises ModelError for shards that are missing, cut short or no safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open_files = ExitStack()
        self._readers: dict[Path, Any] = {}
        self._where: dict[str, TensorInfo] = {}
        expected = _index(directory)
        for path in sorted(set(expected.values())) or [directory / SINGLE]:
            self._where.update(_header(path))
        for name, path in expected.items():
            found = self._where.get(name)
            if found is None or found.path != path:
                raise ModelError(path, f"has no tensor {name}, which {INDEX} puts there", AGAIN)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors that were returned stay valid."""
        self._readers.clear()
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterable[str]:
        """Return the names of all tensors of the model."""
        return self._where.keys()

    def info(self, name: str) -> TensorInfo:
        """Return the place of the tensor `name`. Raises ModelError if no shard has it."""
        found = self._where.get(name)
        if found is None:
            raise ModelError(
                self.directory,
                f"no shard has the tensor {name}",
                "check that config.json and the shards are of one model, and none is missing",
            )
        return found

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor `name` exists with `shape` and a
        floating-point dtype.
        """
        info = self.info(name)
        if info.shape != shape:
            raise ModelError(
                info.path,
                f"tensor {name} has the shape {list(info.shape)}, config.json asks for "
                f"{list(shape)}",
                "check that config.json and the shards are of one model",
            )
        if info.dtype not in DTYPES:
            raise ModelError(
                info.path,
                f"tensor {name} has the dtype {info.dtype}, read are {', '.join(DTYPES)}",
                "serve the unquantized checkpoint",
            )

    def tensor(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return the tensor `name`, or only `rows` and `columns` of it, in its own dtype on the
        CPU.
        """
        info = self.info(name)
        reader = self._readers.get(info.path)
        if reader is None:
            try:
                opened = safe_open(info.path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(info.path, f"cannot be read: {error}", AGAIN) from error
            reader = self._readers[info.path] = self._open_files.enter_context(opened)
        if rows is None and columns is None:
            found = reader.get_tensor(name)
        elif columns is None:
            found = reader.get_slice(name)[rows]
        else:
            found = reader.get_slice(name)[rows or slice(None), columns]
        assert isinstance(found, torch.Tensor)
        return found


def _index(directory: Path) -> dict[str, Path]:
    """Return the file that holds each tensor, by the tensor's name; an empty dictionary if the
    model is one file.
    """
    path = directory / INDEX
    if not path.exists():
        if not (directory / SINGLE).exists():
            raise ModelError(
                directory,
                f"has neither {SINGLE} nor {INDEX}",
                "fetch the safetensors files of the model (other formats are not read)",
            )
        return {}
    listed = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(path, "has no weight_map", AGAIN)
    for name, shard in listed.items():
        # A name with a path in it could point anywhere.
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise ModelError(path, f"puts {name!r:.80} into {shard!r:.80}, no file name", AGAIN)
    shards = sorted(set(listed.values()))
    if len(shards) > MAX_SHARDS:
        raise ModelError(path, f"names {len(shards)} shards, at most {MAX_SHARDS} are read", AGAIN)
    for shard in shards:
        if not (directory / shard).is_file():
            raise ModelError(path, f"names {shard}, which is not there", "fetch that shard, too")
    return {name: directory / shard for name, shard in listed.items()}


def _header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one file, after checking that the file has all their bytes."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ModelError(path, f"asks for a header of {length} bytes", AGAIN)
            text = file.read(length)
            file_bytes = file.seek(0, 2)
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror or error}", AGAIN) from error
    if len(text) < length or length < 2:
        raise ModelError(path, "is cut short within its header", AGAIN)
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            path, f"has a header that is no safetensors header: {error}", AGAIN
        ) from error
    data_bytes = file_bytes - 8 - length
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise ModelError(
                path,
                f"has {data_bytes} bytes of data, tensor {name!r:.120} is at {begin}..{end}: "
                "the file is cut short or damaged",
                AGAIN,
            )
    return {name: TensorInfo(path, entry.dtype, entry.shape) for name, entry in entries.items()}


Matrix = torch.Tensor | Int8Weight


def expected(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the whole shape of every tensor of which the shard reads a part."""
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
    """Return the rows `which` of a matrix as numbers. For an embedding, `which` has token ids."""
    return matrix.rows(which) if isinstance(matrix, Int8Weight) else matrix[which]


def part_of(matrix: Matrix, rows: slice) -> Matrix:
    """Return these rows of a matrix as a view, which shares the matrix's memory."""
    return matrix.part(rows) if isinstance(matrix, Int8Weight) else matrix[rows]


class Weights:
    """Reads the parts of one shard onto its device. Lifetime: while a model loads.

    Raises ModelError at once for any tensor that is missing or has another shape or dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: str,
        dtype: torch.dtype,
        shard: Shard,
        quantization: Quantization = PLAIN,
        int8_kernel: Int8Kernel | None = None,
    ) -> None:
        config.check_shard(shard)
        for name, shape in expected(config, shard):
            checkpoint.check(name, shape)
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._quantization, self._int8_kernel = quantization, int8_kernel
        self.bytes_read = 0  # as they are kept

    def vector(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a one-dimensional tensor, or `rows` of it."""
        return self._counted(self._checkpoint.tensor(name, rows).to(self._device, self._dtype))

    def matrix(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Matrix:
        """Return a matrix, or these rows and columns of it."""
        if self._quantization.covers(name):
            return self._int8([(name, rows or slice(None))], columns)
        found = self._checkpoint.tensor(name, rows, columns)
        return self._counted(found.to(self._device, self._dtype).contiguous())

    def matrices(self, names: list[tuple[str, slice]]) -> Matrix:
        """Return rows of several matrices of one width, one below the other."""
        if self._quantization.covers(names[0][0]):
            return self._int8(names)
        return self.joined(names)

    def joined(self, names: list[tuple[str, slice]]) -> torch.Tensor:
        """Return rows of several tensors, one below the other, each of them read directly into its
        place.
        """
        parts = [self._checkpoint.tensor(name, rows) for name, rows in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        at = 0
        for part in parts:
            whole[at : at + part.shape[0]] = part
            at += part.shape[0]
        return self._counted(whole)

    def _int8(self, names: list[tuple[str, slice]], columns: slice | None = None) -> Int8Weight:
        """Return rows of several matrices as integers, one below the other; the integers are the
        same in every shard.
        """
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
