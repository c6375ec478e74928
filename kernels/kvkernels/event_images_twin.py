"""Images of one block as TensorRT-LLM's push tells them (`mm_keys`), in plain Python."""

from __future__ import annotations

from collections.abc import Callable

from kvkernels.msgpack_twin import Header, Reader


def read_images(reader: Reader, counted: Callable[[bytes], bytes]) -> tuple[list[bytes], bool]:
    """(the bytes to hash for each image, whether one was of no known shape).

    One block's list of maps with `hash` and `start_offset`, or nil. Format: NVIDIA TensorRT-LLM,
    KV event publisher, 2026-08. `counted` is told each image, and raises ValueError for too much.
    """
    start = reader.at
    outer = reader.header()
    parts: list[bytes] = []
    odd = outer.kind not in ("array", "nil")
    if odd:
        reader.at = start
        reader.skip()
    for _ in range(outer.size if outer.kind == "array" else 0):
        start = reader.at
        item = reader.header()
        if item.kind != "map":
            reader.at = start
            reader.skip()
            odd = True
            continue
        part = _image(reader, item.size)
        if part is None:
            odd = True
        else:
            parts.append(counted(part))
    return parts, odd


def _image(reader: Reader, pairs: int) -> bytes | None:
    """Its hash as it is written, then its offset. Of a key given twice, the last counts."""
    image: bytes | None = None
    offset: bytes | None = bytes(4)
    odd = False
    for _ in range(pairs):
        key = _key(reader)
        start = reader.at
        value = reader.header()
        if key == b"hash" and value.kind in ("str", "bin"):
            image = reader.take(value.size)
            continue
        if key == b"start_offset":
            offset = offset_of(value)
            odd |= offset is None
        reader.at = start
        reader.skip()
    return None if odd or image is None or offset is None else image + offset


def _key(reader: Reader) -> bytes:
    """A map's next key; empty where it is no string."""
    start = reader.at
    name = reader.header()
    if name.kind == "str":
        return reader.take(name.size)
    reader.at = start
    reader.skip()
    return b""


def offset_of(header: Header) -> bytes | None:
    """An image's place in its block, 4 bytes; None for what is no int32."""
    if header.kind != "int" or not -(2**31) <= header.value < 2**31:
        return None
    return header.value.to_bytes(4, "little", signed=True)
