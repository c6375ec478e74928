"""Complaints about types in JSON's words, for people who do not know Python's."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"`[^`]*`")
_NAME = re.compile(r"\b(?:bool|str|int|float)\b")
_IN_JSON = {"bool": "boolean", "str": "string", "int": "integer", "float": "number"}


def json_words(complaint: str) -> str:
    """msgspec's "Expected `bool | null`, got `str`" as "expected boolean or null, got string".

    Only what stands in backticks is a type there; all else stays as it is.
    """
    spoken = _QUOTED.sub(_spoken, complaint)
    return f"{spoken[:1].lower()}{spoken[1:]}"


def _spoken(quoted: re.Match[str]) -> str:
    types = quoted[0].strip("`").replace(" | ", " or ")
    return _NAME.sub(lambda name: _IN_JSON[name[0]], types)
