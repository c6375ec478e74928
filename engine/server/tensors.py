"""Tensors of KServe v2 over HTTP: JSON, or binary after the JSON.

After triton-inference-server/server (`docs/protocol`: extension binary data): the header
Inference-Header-Content-Length says where the JSON ends, `binary_data_size` how many bytes each
tensor has after it; a text in binary has its length before it, four bytes, little-endian.
"""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import msgspec
import numpy as np

from engine.server.errors import ApiError

MAX_TENSORS = 64
MAX_RANK = 8
_NUMPY = (
    ("BOOL", "?"),
    ("INT32", "<i4"),
    ("INT64", "<i8"),
    ("UINT32", "<u4"),
    ("UINT64", "<u8"),
    ("FP32", "<f4"),
    ("BYTES", "O"),
)
Values = list[Any]


class Tensor(msgspec.Struct, frozen=True):
    """One input as it stands in the JSON. Lifetime: request."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] = {}


class Wanted(msgspec.Struct, frozen=True):
    """One output that the client asks for. Lifetime: request."""

    name: str
    parameters: dict[str, Any] = {}


class InferBody(msgspec.Struct, frozen=True):
    """The JSON of an `infer` request. Lifetime: request."""

    inputs: list[Tensor]
    id: str = ""
    outputs: list[Wanted] | None = None
    parameters: dict[str, Any] = {}


_BODY = msgspec.json.Decoder(InferBody)


def read(body: bytes, header: str | None) -> tuple[InferBody, dict[str, tuple[str, Values]]]:
    """The request and its inputs by name: datatype and values, flat.

    `header`: Inference-Header-Content-Length. Raises ApiError 400 naming the input that is wrong.
    """
    end = len(body)
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) < 12 and int(header) <= end):
            raise ApiError(400, "Inference-Header-Content-Length must be a length within the body")
        end = int(header)
    try:
        told = _BODY.decode(body[:end])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"request body: {error}") from error
    if len(told.inputs) > MAX_TENSORS:
        raise ApiError(400, f"{len(told.inputs)} inputs; at most {MAX_TENSORS}", "inputs")
    found: dict[str, tuple[str, Values]] = {}
    for one in told.inputs:
        if one.name in found:
            raise _wrong(one, "is given twice")
        size = one.parameters.get("binary_data_size")
        if size is None:
            values = _listed(one)
        elif type(size) is int and 0 <= size <= len(body) - end:
            values = _unpacked(one, body[end : end + size])
            end += size
        else:
            raise _wrong(one, f"has binary_data_size {size!r}; {len(body) - end} bytes are left")
        if len(one.shape) > MAX_RANK or any(size < 0 for size in one.shape):
            raise _wrong(one, f"must have 0..{MAX_RANK} dimensions of 0 or more")
        if prod(one.shape) != len(values):
            raise _wrong(one, f"has {len(values)} values for the shape {one.shape}")
        found[one.name] = one.datatype, values
    if end != len(body):
        raise ApiError(400, f"{len(body) - end} bytes follow the last input", "inputs")
    return told, found


def _wrong(tensor: Tensor, why: str) -> ApiError:
    name = tensor.name[:128]
    return ApiError(400, f"input {name!r} {why}", name)


def _kind(tensor: Tensor) -> np.dtype[Any]:
    kind = dict(_NUMPY).get(tensor.datatype)
    if kind is None:
        known = ", ".join(name for name, _ in _NUMPY)
        raise _wrong(tensor, f"has datatype {tensor.datatype[:32]!r}; known are {known}")
    return np.dtype(kind)


def _listed(tensor: Tensor) -> Values:
    """The values of `data`, nested as the shape is or flat."""
    kind = _kind(tensor)
    values: Values = tensor.data if isinstance(tensor.data, list) else [tensor.data]
    for _ in range(MAX_RANK):
        if not any(isinstance(value, list) for value in values):
            break
        values = [
            inner for value in values for inner in (value if isinstance(value, list) else [value])
        ]
    if not all(_is_of(kind, value) for value in values):
        raise _wrong(tensor, f"has data that is not {tensor.datatype}")
    return values


def _is_of(kind: np.dtype[Any], value: Any) -> bool:
    if kind.kind == "O":
        return isinstance(value, str)
    if kind.kind == "b":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind.kind == "f":
        return abs(value) <= float(np.finfo(kind).max)
    return isinstance(value, int) and np.iinfo(kind).min <= value <= np.iinfo(kind).max


def _unpacked(tensor: Tensor, data: bytes) -> Values:
    kind = _kind(tensor)
    if kind.kind == "O":
        return _texts(tensor, data)
    if len(data) % kind.itemsize:
        raise _wrong(tensor, f"has {len(data)} bytes, no whole number of {tensor.datatype}")
    values: Values = np.frombuffer(data, dtype=kind).tolist()
    if kind.kind == "f" and not all(map(isfinite, values)):
        raise _wrong(tensor, "must be finite")
    return values


def _texts(tensor: Tensor, data: bytes) -> Values:
    found: Values = []
    at = 0
    while at < len(data):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or at > len(data):
            raise _wrong(tensor, "has a text that is cut short")
        try:
            found.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise _wrong(tensor, "has a text that is not UTF-8") from error
    return found


def written(
    head: dict[str, Any], outputs: dict[str, tuple[str, Values]], binary: frozenset[str]
) -> tuple[bytes, int | None]:
    """An answer's body, and the length of its JSON where tensors follow it in binary.

    `outputs`: datatype and values of each vector, by name; `binary`: those to pack.
    """
    parts: list[bytes] = []
    rows: list[dict[str, Any]] = []
    for name, (datatype, values) in outputs.items():
        row: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(values)]}
        if name in binary:
            parts.append(_packed(datatype, values))
            row["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            row["data"] = values
        rows.append(row)
    text = msgspec.json.encode(head | {"outputs": rows})
    return b"".join([text, *parts]), len(text) if parts else None


def _packed(datatype: str, values: Values) -> bytes:
    if datatype != "BYTES":
        return np.array(values, dtype=dict(_NUMPY)[datatype]).tobytes()
    texts = [str(value).encode() for value in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
