"""Reads the keys of the configuration from Structs: path, flag, variable, type, range and help of
each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from policies.near import did_you_mean

_QUOTED = re.compile(r"`[^`]*`")
_NAME = re.compile(r"\b(?:bool|str|int|float)\b")
_IN_JSON = {"bool": "boolean", "str": "string", "int": "integer", "float": "number"}


def json_words(complaint: str) -> str:
    """Return msgspec's error message with JSON's names of types.

    "Expected `bool | null`, got `str`" becomes "expected boolean or null, got string". Only words
    in backticks are types; all other text stays.
    """
    spoken = _QUOTED.sub(_spoken, complaint)
    return f"{spoken[:1].lower()}{spoken[1:]}"


def _spoken(quoted: re.Match[str]) -> str:
    types = quoted[0].strip("`").replace(" | ", " or ")
    return _NAME.sub(lambda name: _IN_JSON[name[0]], types)


PREFIX = "WARMROUTE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_UNITS = MappingProxyType({"_s": "SECONDS", "_ms": "MS", "_bytes": "BYTES"})


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """Describes one key of the configuration. Lifetime: process."""

    path: str  # dotted, as in the file
    kind: Any  # annotated type, as msgspec takes it
    default: Any
    help: str
    allowed: str  # range or values, for people
    item_flag: str | None = None  # for a list: the name of its flag, which takes one item
    form: str | None = None  # placeholder of the value in help; None: follows from the type

    @property
    def flag(self) -> str:
        """The key's command-line flag; the flag of a list takes one item and may be repeated."""
        return self.item_flag or flag_of(self.path)

    @property
    def attribute(self) -> str:
        """The name of the attribute in which argparse stores the flag's value."""
        return attribute_of(self.path)

    @property
    def variable(self) -> str:
        """The key's environment variable."""
        return variable_of(self.path)

    @property
    def metavar(self) -> str:
        """The placeholder for the key's value in a line of help."""
        if self.form is not None:
            return self.form
        inner = get_args(self.kind)[0]
        if get_origin(inner) is Literal:
            return "|".join(get_args(inner))
        if inner is bool:
            return "true|false"
        unit = next((word for end, word in _UNITS.items() if self.path.endswith(end)), None)
        return unit or ("N" if inner in (int, float) else "TEXT")

    @property
    def is_list(self) -> bool:
        """True if the value is a list of texts, which the environment variable separates
        by blanks.
        """
        return isinstance(self.default, tuple)

    @property
    def is_optional(self) -> bool:
        """True if `none` is an allowed value."""
        return self.default is None

    def read(self, value: object) -> Any:
        """Return `value`, from a file or as text, converted to the key's type.

        Raises ValueError with the allowed range.
        """
        if self.is_optional and isinstance(value, str) and value.lower() in ("none", "null"):
            return None
        try:
            read = msgspec.convert(value, self.kind, strict=False)
        except (msgspec.ValidationError, OverflowError) as error:
            what = json_words(str(error).removesuffix(" - at `$`"))
            inner = get_args(self.kind)[0]
            near = did_you_mean(str(value), get_args(inner)) if get_origin(inner) is Literal else ""
            raise ValueError(f"{what}{near}; allowed: {self.allowed}") from error
        if isinstance(read, float) and not isfinite(read):
            raise ValueError(f"{read} is not a finite number; allowed: {self.allowed}")
        return read


def flag_of(path: str) -> str:
    """Return the command-line flag of the key `path`."""
    return "--" + path.replace(".", "-").replace("_", "-")


def attribute_of(path: str) -> str:
    """Return the name of the attribute in which argparse stores a key's flag."""
    return path.replace(".", "_")


def variable_of(path: str) -> str:
    """Return the environment variable of the key `path`."""
    return PREFIX + attribute_of(path).upper()


@cache
def keys_of(struct: type[msgspec.Struct]) -> Mapping[str, ConfigKey]:
    """Return all keys of a Struct and of its sections by path, the top level first.

    Each field is `Annotated[type, Meta(description=...)]`; a section is a field that is a Struct.
    """
    found: dict[str, ConfigKey] = {}
    _collect(struct, "", found)
    top = {path: key for path, key in found.items() if "." not in path}
    return MappingProxyType(top | found)


def value_at(settings: msgspec.Struct, path: str) -> Any:
    """Return the value of the key `path` in `settings`."""
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def text_of(value: Any) -> str:
    """Return a value as a user writes it in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(value) or "none given"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _collect(struct: type[msgspec.Struct], prefix: str, found: dict[str, ConfigKey]) -> None:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, path = hints[field.name], prefix + field.name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            _collect(hint, f"{path}.", found)
            continue
        inner, *metas = get_args(hint)
        (meta,) = metas
        extra = meta.extra or {}
        names = extra.get("flag"), extra.get("metavar")
        found[path] = ConfigKey(
            path, hint, field.default, meta.description, _allowed(inner, meta), *names
        )


def _allowed(kind: Any, meta: msgspec.Meta) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if kind is bool:
        return "true, false"
    if meta.ge is not None:
        return f"{text_of(meta.ge)}..{text_of(meta.le)}"
    if meta.pattern is not None:
        large = "A-Z" in meta.pattern
        return "letters, digits, dots, dashes" if large else "small letters, digits, dashes"
    return "text or none" if type(None) in get_args(kind) else "list" if kind is not str else "text"
