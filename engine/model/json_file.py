"""One bounded JSON object of a model directory, and its fields with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.model.errors import ModelError

AGAIN = "fetch the model again, or point to another folder"


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`; raises ModelError where there is none of at most `max_bytes`."""
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror or error}", AGAIN) from error
    if len(text) > max_bytes:
        raise ModelError(path, f"larger than {max_bytes} bytes", AGAIN)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(path, f"is no JSON object: {error}", AGAIN) from error


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a file, whose fields are read with type and range checked; null is absent.

    Every reader raises ModelError naming file and field.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""  # of the names in errors, for objects within objects

    def refuse(self, name: str, what: str, remedy: str) -> ModelError:
        """The error about the field `name`."""
        return ModelError(self.path, f"{self.prefix}{name} {what}", remedy)

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An int in low..high; must be there where there is no default."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.refuse(name, "is missing", AGAIN)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"must be an int in {low}..{high}, is {value!r:.80}", AGAIN)
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A float in low..high; must be there where there is no default."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.refuse(name, "is missing", AGAIN)
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.refuse(
                name, f"must be a number in {low:g}..{high:g}, is {value!r:.80}", AGAIN
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A bool."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, is {value!r:.80}", AGAIN)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a string, is {value!r:.80}", AGAIN)
        return value

    def within(self, name: str) -> Fields:
        """The object in the field `name`; an empty one where it is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(name, f"must be an object, is {value!r:.80}", AGAIN)
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """Token ids, written as one int or a list of at most 256."""
        value = self.values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
                raise self.refuse(name, f"must be ids in 0..{vocab - 1}, is {value!r:.80}", AGAIN)
        if len(listed) > 256:
            raise self.refuse(name, f"has {len(listed)} ids, at most 256 are read", AGAIN)
        return tuple(listed)
