"""Reads and replaces fields of a JSON object in place; all other bytes stay unchanged."""

from __future__ import annotations

from collections.abc import Mapping

from kvkernels import body_fields


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return the JSON object in `body` with more fields before its own fields. Each new value is
    given as JSON.
    """
    brace = body.index(b"{") + 1
    new = b"".join(b'"%b":%b,' % (name.encode(), value) for name, value in fields.items())
    if body[brace:].lstrip(b" \t\r\n").startswith(b"}"):
        new = new[:-1]
    return b"".join((body[:brace], new, body[brace:]))


def with_values(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return the JSON object in `body` with new values, each given as JSON. A value replaces that
    of an existing field; a missing field is added before the object's own fields.
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
    """Return the values of the named fields of a JSON object, byte for byte. A value is None if the
    field is missing or the text is no JSON object.
    """
    fault, _, found = body_fields(text, names)
    if fault is not None:
        return [None] * len(names)
    return [None if field is None else text[field[0] : field[1]] for field in found]


def with_last_field(body: bytes, name: str, value: bytes) -> bytes:
    """Return the JSON object in `body`, which is not empty, with one more field at its end. JSON
    readers take the last of two fields with equal names.
    """
    end = body.rindex(b"}")
    field = b',"%s":%s' % (name.encode(), value)
    return b"".join((memoryview(body)[:end], field, memoryview(body)[end:]))
