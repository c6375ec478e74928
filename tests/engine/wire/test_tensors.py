"""Tests that KServe tensors are the same as bytes and as JSON, and that invalid ones are
refused.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.events import WireError
from engine.wire.tensors import (
    NUMBERS,
    TEXT,
    Described,
    Tensor,
    infer_request,
    json_bytes,
    listed,
    numbers,
    packed,
    texts,
)

# The `struct` code of each datatype, as an oracle.
CODES = dict(zip(NUMBERS, "?bhiqBHIQfd", strict=True))


def element(datatype: str) -> st.SearchStrategy[Any]:
    """Draw any element that the datatype has."""
    if datatype == "BOOL":
        return st.booleans()
    if datatype.startswith("FP"):
        return st.floats(width=int(datatype[2:]), allow_nan=False, allow_infinity=False)
    bits = int(datatype.lstrip("UINT"))
    low = 0 if datatype.startswith("U") else -(2 ** (bits - 1))
    return st.integers(low, low + 2**bits - 1)


@given(st.data(), st.sampled_from([*NUMBERS]))
def test_numbers_are_the_same_as_bytes_and_as_json(data: st.DataObject, datatype: str) -> None:
    values = data.draw(st.lists(element(datatype), max_size=9))
    raw = struct.pack(f"<{len(values)}{CODES[datatype]}", *values)
    assert packed(datatype, values) == raw
    text = msgspec.Raw(json.dumps([values]).encode())
    most = data.draw(st.none() | st.integers(0, 9))
    for one in (Tensor(datatype, (), raw), Tensor(datatype, (), None, listed(text))):
        assert numbers(one, most).tolist() == values[:most]


@given(st.lists(st.text(), max_size=9), st.none() | st.integers(0, 9))
def test_texts_are_the_same_as_bytes_and_as_json(values: list[str], most: int | None) -> None:
    sound = [one.encode("utf-8", "replace").decode() for one in values]
    assert [*texts(Tensor(TEXT, (), None, values), most)] == values[:most]
    from_bytes = [str(one, "utf-8") for one in texts(Tensor(TEXT, (), packed(TEXT, sound)), most)]
    assert from_bytes == sound[:most]


@given(
    st.sampled_from([*NUMBERS, TEXT, "FP16", ""]),
    st.binary(max_size=40) | st.binary(max_size=40).map(memoryview),
)
def test_random_bytes_are_read_as_elements_or_refused(datatype: str, raw: bytes) -> None:
    one = Tensor(datatype, (), raw)
    try:
        found = [bytes(each) for each in texts(one)] if datatype == TEXT else numbers(one).tolist()
    except WireError:
        return
    if datatype in (TEXT, "INT64", "UINT8"):
        assert packed(datatype, found) == raw


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*NUMBERS, TEXT]), JSON, st.none() | st.integers(0, 3))
def test_random_json_is_read_as_elements_or_refused(
    datatype: str, value: Any, most: int | None
) -> None:
    try:
        one = Tensor(datatype, (), None, listed(msgspec.Raw(json.dumps(value).encode())))
        found = [*texts(one, most)] if datatype == TEXT else numbers(one, most).tolist()
    except WireError:
        return
    assert most is None or len(found) <= most
    if datatype.endswith("INT8"):
        assert all(type(each) is int and -128 <= each < 256 for each in found)


@pytest.mark.parametrize(
    ("header", "size", "found"),
    [(None, 9, 9), ("0", 9, 0), ("9", 9, 9), ("10", 9, None), ("-1", 9, None), ("٣", 9, None),
     ("9" * 5_000, 9, None), ("", 9, None), (" 9", 9, None)],
)  # fmt: skip
def test_the_json_length_must_lie_within_the_body(
    header: str | None, size: int, found: int | None
) -> None:
    if found is None:
        with pytest.raises(WireError, match="must be a length"):
            json_bytes(header, size)
    else:
        assert json_bytes(header, size) == found


@pytest.mark.parametrize("size", [-1, 4, True, "1", 1.0, 10**30, [1]])
def test_a_tensor_with_a_wrong_byte_size_is_refused(size: Any) -> None:
    one = Described("x", parameters={"binary_data_size": size})
    with pytest.raises(WireError, match="3 bytes are left"):
        one.raw(memoryview(b"abc"))


@given(JSON)
def test_random_json_is_read_as_a_request_or_refused(value: Any) -> None:
    for message in (
        value,
        {"inputs": value, "id": value},
        {"inputs": [{"name": "x", "shape": value}]},
    ):
        try:
            request = infer_request(json.dumps(message).encode())
        except WireError:
            continue
        assert all(isinstance(one.name, str) for one in request.inputs)
