"""Reads and replaces fields of a JSON object in place; all other bytes stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from kvkernels import body_fields


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return the object with more fields, each given as JSON, before its own."""
    brace = body.index(b"{") + 1
    new = b"".join(b'"%b":%b,' % (name.encode(), value) for name, value in fields.items())
    if body[brace:].lstrip(b" \t\r\n").startswith(b"}"):
        new = new[:-1]
    return b"".join((body[:brace], new, body[brace:]))


def with_values(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return the object with other values, each given as JSON: in place, or before its own fields
    if missing.
    """
    fault, _, found = body_fields(body, tuple(fields))
    assert fault is None, "what was read before"
    pieces, at, missing = list[bytes](), 0, dict(fields)
    there = [(field, name) for name, field in zip(fields, found, strict=True) if field is not None]
    for (begin, end, *_), name in sorted(there):
        pieces += body[at:begin], missing.pop(name)
        at = end
    return with_fields(b"".join((*pieces, body[at:])), missing)


def values_in(text: bytes, names: tuple[str, ...]) -> list[bytes | None]:
    """Return values of an object, byte for byte; None for a missing field, or if the text is no
    object.
    """
    fault, _, found = body_fields(text, names)
    if fault is not None:
        return [None] * len(names)
    return [None if field is None else text[field[0] : field[1]] for field in found]


def with_last_field(body: bytes, name: str, value: bytes) -> bytes:
    """Return the object, which is not empty, with one more field at its end. Readers take the last
    of two equal names.
    """
    end = body.rindex(b"}")
    field = b',"%s":%s' % (name.encode(), value)
    return b"".join((memoryview(body)[:end], field, memoryview(body)[end:]))
