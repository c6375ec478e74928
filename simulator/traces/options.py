"""`NAME?key=value&key=value`: what formats and generators are told, checked against a struct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import inspect

from simulator.traces.errors import TraceError
from simulator.traces.size import Size

S = TypeVar("S", bound=msgspec.Struct)


def name_of(spec: str) -> str:
    """What stands before the question mark."""
    return unquote(spec.partition("?")[0])


def parse_options(spec: str, kind: type[S]) -> S:
    """The options in `spec` as a `kind`; what is not named has its default.

    Raises `TraceError` for an unknown key (with the valid ones) and for a bad value.
    """
    name, _, query = spec.partition("?")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    values: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        key = unquote(key)
        if key not in known:
            expected = ", ".join(sorted(known)) or "none"
            raise TraceError(f"{name}: unknown key {key!r}; valid ones: {expected}")
        if not equals or key in values:
            raise TraceError(f"{name}: {pair!r}: expected each key once, as key=value")
        values[key] = unquote(value)
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_size)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)", str(error))
        key = where[1] if where else "?"
        raise TraceError(f"{name}: {key}={values.get(key, '')}: {error}") from error


def _size(kind: type, value: Any) -> Any:
    if kind is not Size:  # how a hook tells msgspec that it does not know a type
        raise NotImplementedError(kind)
    return Size.parse(str(value))


def option_rows(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of each option, for help texts."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        about = field.type
        meaning = ""
        if isinstance(about, inspect.Metadata):
            meaning = (about.extra_json_schema or {}).get("description", "")
        default = "" if field.default is None else _text(field.default)
        yield field.encode_name, default, meaning


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
