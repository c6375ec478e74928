"""Tensors of KServe v2 as HTTP carries them: in a message's JSON, or as bytes behind it.

The format follows triton-inference-server/server, `docs/protocol` (extension binary data): the
header Inference-Header-Content-Length says where the JSON ends; the bytes of each tensor that has a
`binary_data_size` follow it in order. Elements lie in rows, little-endian, and each of BYTES after
its length, four bytes. gRPC has tensors of the same elements in messages of its own.

The engine serves by this module, and the router reads requests with it. The text of a WireError
about a tensor continues after the tensor's name: "has a text that is cut short".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.wire.events import WireError

LENGTH_HEADER = "Inference-Header-Content-Length"
TEXT = "BYTES"
MAX_RANK = 8
NUMBERS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype("?"),
        **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
        **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
    }
)
_TYPES = MappingProxyType({"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)})
Buffer = bytes | memoryview


class Described(msgspec.Struct, frozen=True):
    """A tensor as a message's JSON describes it. Lifetime: message."""

    name: str
    shape: list[int] | None = None
    datatype: str = ""
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: dict[str, Any] = {}

    def raw(self, rest: memoryview) -> memoryview | None:
        """Return the tensor's bytes, which are the first of `rest`; None if its elements are in
        `data`. Raises WireError if there are too few bytes.
        """
        size = self.parameters.get("binary_data_size")
        if size is None:
            return None
        if type(size) is not int or not 0 <= size <= len(rest):
            raise WireError(f"has binary_data_size {repr(size)[:32]}; {len(rest)} bytes are left")
        return rest[:size]


class Wanted(msgspec.Struct, frozen=True):
    """An output tensor that a request asks for. Lifetime: request."""

    name: str = ""
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, frozen=True):
    """The JSON of an `infer` request. Lifetime: request."""

    inputs: list[Described] = []
    outputs: list[Wanted] = []
    parameters: dict[str, Any] = {}
    id: str | None = None


class InferResponse(msgspec.Struct, frozen=True):
    """The part of an answer's JSON that describes tensors. Lifetime: answer."""

    outputs: list[Described] = []


class Tensor(msgspec.Struct, frozen=True):
    """The elements of a tensor: as bytes in `raw`, or else in `listed`, nested or flat. Lifetime:
    message.
    """

    datatype: str
    shape: tuple[int, ...]
    raw: Buffer | None = None
    listed: Sequence[Any] | None = None


_INFER = msgspec.json.Decoder(InferRequest)


def json_bytes(header: str | None, body_bytes: int) -> int:
    """Return the length of the JSON in a body. `header` is the value of
    Inference-Header-Content-Length. Raises WireError for an invalid length.
    """
    if header is None:
        return body_bytes
    if header.isascii() and header.isdigit() and len(header) < 12 and int(header) <= body_bytes:
        return int(header)
    raise WireError(f"{LENGTH_HEADER} must be a length within the body")


def infer_request(text: Buffer) -> InferRequest:
    """Return the `infer` request that this JSON describes. Raises WireError if it is invalid."""
    try:
        return _INFER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"request body: {error}") from error


def listed(data: msgspec.Raw) -> list[Any]:
    """Return the elements that a tensor's JSON `data` has, nested or flat; a single value becomes a
    list of one. Raises WireError for invalid JSON.
    """
    try:
        found = msgspec.json.decode(data) if len(data) else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"has data that is no JSON: {error}") from error
    return found if isinstance(found, list) else [found]


def texts(tensor: Tensor, most: int | None = None) -> Iterator[str | Buffer]:
    """Yield the first `most` elements of a tensor of texts, unchanged; None yields all. Raises
    WireError for invalid elements.
    """
    if tensor.datatype != TEXT:
        raise WireError(f"is {tensor.datatype[:16]}, not {TEXT}")
    if tensor.raw is None:
        for value in _flat(tensor.listed, most):
            if not isinstance(value, str | bytes):
                raise WireError("has an element that is no text")
            yield value
        return
    at, found, view = 0, 0, memoryview(tensor.raw)
    while at < len(view) and found != most:
        start = at + 4
        at = start + int.from_bytes(view[at:start], "little")
        if at > len(view):
            raise WireError("has a text that is cut short")
        yield view[start:at]
        found += 1


def numbers(tensor: Tensor, most: int | None = None) -> npt.NDArray[Any]:
    """Return the first `most` elements of a tensor of numbers or booleans as a flat array; None
    returns all. Raises WireError for invalid elements.
    """
    kind = NUMBERS.get(tensor.datatype)
    if kind is None:
        known = ", ".join((*NUMBERS, TEXT))
        raise WireError(f"has datatype {tensor.datatype[:16]!r}; known are {known}")
    if tensor.raw is not None:
        whole, rest = divmod(len(tensor.raw), kind.itemsize)
        if rest:
            raise WireError(f"has {len(tensor.raw)} bytes, no whole number of {tensor.datatype}")
        return np.frombuffer(tensor.raw, kind, whole if most is None else min(whole, most))
    flat = _flat(tensor.listed, most)
    if not all(type(value) in _TYPES[kind.kind] for value in flat):
        raise WireError(f"has an element that is not {tensor.datatype}")
    try:
        with np.errstate(over="raise"):
            return np.array(flat, kind)
    except (OverflowError, FloatingPointError) as error:
        raise WireError(f"has an element beyond {tensor.datatype}") from error


def _flat(listed: Sequence[Any] | None, most: int | None) -> list[Any]:
    """Return the first elements of a nested list. Raises WireError if it is nested too deeply."""
    flat = list((listed or ())[:most])
    for _ in range(MAX_RANK):
        if not any(isinstance(value, list) for value in flat):
            return flat
        flat = [
            inner
            for value in flat
            for inner in (value[:most] if isinstance(value, list) else (value,))
        ][:most]
    raise WireError(f"is nested deeper than {MAX_RANK}")


def infer_answer(
    head: Mapping[str, Any],
    outputs: Mapping[str, tuple[str, Sequence[Any]]],
    binary: frozenset[str],
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if tensors follow it as bytes.

    `head` has its other fields, `outputs` the datatype and elements of each vector by name, and
    `binary` the names of the vectors to write as bytes.
    """
    parts: list[bytes] = []
    rows: list[dict[str, Any]] = []
    for name, (datatype, elements) in outputs.items():
        row: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(elements)]}
        if name in binary:
            parts.append(packed(datatype, elements))
            row["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            row["data"] = elements
        rows.append(row)
    text = msgspec.json.encode({**head, "outputs": rows})
    return b"".join([text, *parts]), len(text) if parts else None


def packed(datatype: str, elements: Sequence[Any]) -> bytes:
    """Return the elements of a tensor as bytes, as KServe's binary data has them."""
    if datatype != TEXT:
        return np.array(elements, NUMBERS[datatype]).tobytes()
    data = [one if isinstance(one, bytes) else str(one).encode() for one in elements]
    return b"".join(len(one).to_bytes(4, "little") + one for one in data)
