"""Weights on disk: safetensors shards, their headers checked before anything is computed.

Format: huggingface/safetensors 0.8 (8 bytes of header length, little-endian, a JSON header, raw
data); shards are named by `model.safetensors.index.json`. The data is memory-mapped: only what
is asked for is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from engine.model.errors import ModelError
from engine.model.json_file import AGAIN, read_object

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
    """Where a tensor is and what the header says of it."""

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
        """Unmap the files; tensors that were given stay."""
        self._readers.clear()
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._where.keys()

    def info(self, name: str) -> TensorInfo:
        """Where `name` is; raises ModelError where no shard has it."""
        found = self._where.get(name)
        if found is None:
            raise ModelError(
                self.directory,
                f"no shard has the tensor {name}",
                "check that config.json and the shards are of one model, and none is missing",
            )
        return found

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless `name` is there with `shape` and a floating-point dtype."""
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
        """`name`, or those rows and columns of it, in its own dtype on the CPU."""
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
    """Tensor name -> shard; empty where the model is one file."""
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
    """The tensors of one file, after checks that its bytes hold them all."""
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
