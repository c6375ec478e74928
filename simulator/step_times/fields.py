"""Reads fields of a config.json with bounds; each error has the file, the field, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 4 << 20
_MAX_TEXT = 200  # of a value that an error quotes


class ConfigError(ValueError):
    """Raised for a config.json that allows no profile; the message has the field, and
    what to do.
    """


class Fields:
    """The fields of one object of a config.json."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def where(self, name: str) -> str:
        """Return the place of a field in the form in which errors name it."""
        return f"{self._path}: {self._prefix}{name}"

    def names(self) -> Iterable[str]:
        """Return the names of the fields that exist."""
        return self._values.keys()

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self._values.get(name) is not None

    def section(self, name: str) -> Fields | None:
        """Return the nested object in a field; None if there is none."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where(name)}: {_shown(value)}, where an object is expected")
        return Fields(self._path, value, f"{self._prefix}{name}.")

    def whole(self, *names: str, most: int, least: int = 1) -> int | None:
        """Return the whole number in the first of the fields `names` that exists; None if none
        does.
        """
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{self.where(name)}: {_shown(value)}, where a whole number from {least} to "
                    f"{most} is expected; correct the file"
                )
            return value
        return None

    def needed(self, *names: str, most: int) -> int:
        """Return the whole number in the first of the fields `names` that exists. Raises
        ConfigError if none does.
        """
        found = self.whole(*names, most=most)
        if found is None:
            raise ConfigError(
                f"{self.where(names[0])}: is missing; expected the config.json of a transformer "
                "that writes text, as Hugging Face keeps it"
            )
        return found

    def flag(self, name: str) -> bool | None:
        """Return the boolean in a field; None if the field is missing."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.where(name)}: {_shown(value)}, where true or false is meant")
        return value

    def text(self, name: str) -> str | None:
        """Return the short text in a field, which may have no control characters; None if the field
        is missing.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
            raise ConfigError(
                f"{self.where(name)}: {_shown(value)}, where a short text is expected"
            )
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return any text; None if the field is missing or no text."""
        value = self._values.get(name)
        return value if isinstance(value, str) else None

    def texts(self, name: str) -> list[str]:
        """Return all texts of the list in a field; an empty list if the field is missing."""
        value = self._values.get(name)
        return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

    def wholes(self, name: str, most: int) -> list[int]:
        """Return all whole numbers of the list in a field, each 0 to `most`; an empty list if the
        field is missing.
        """
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigError(f"{self.where(name)}: {_shown(value)}, where a list is expected")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= most:
                raise ConfigError(
                    f"{self.where(name)}: {_shown(one)}, where whole numbers from 0 to {most} are "
                    "expected"
                )
        return value

    def is_list(self, name: str) -> bool:
        """Return whether the field holds a list."""
        return isinstance(self._values.get(name), list)


def read_fields(path: Path) -> Fields:
    """Return the object in a config.json, or in the config.json of a folder. Raises ConfigError if
    it cannot be read.
    """
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be read: {why}; name a model's config.json or its folder"
        ) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a config.json")
    try:
        values = json.loads(text)  # as Python writes it: NaN and Infinity stand in such files
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}; expected a config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {_shown(values)}, where a JSON object is expected")
    return Fields(path, values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
