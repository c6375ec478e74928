"""Reads a YAML file of settings as values by key path, each with its place in the file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from router.config.paths import unreadable

MAX_FILE_BYTES = 1 << 20
_NULL = "tag:yaml.org,2002:null"


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used; `problems` has a line for each error."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a setting, and the place where the value was given. Lifetime: one reading of the
    configuration.
    """

    value: Any
    source: str  # "file:line", "flag --port", "WARMROUTE_PORT" or "default"
    item_sources: tuple[str, ...] = ()  # for a list in a file: where each item begins

    def source_of(self, item: int) -> str:
        """Return the place where item number `item` of a list was given."""
        return self.item_sources[item] if item < len(self.item_sources) else self.source


def read_file(path: Path, sections: Collection[str]) -> dict[str, Given]:
    """Return the value of each key path in the file, in the file's order. Keys are not checked
    here, except for repetition. `sections` are the names of mappings that hold keys; other mappings
    are not searched, so that YAML aliases cannot expand without bound. Raises ConfigError if the
    file cannot be read, is too large, or is not YAML of this shape.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([unreadable(path, error)]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{path}: larger than {MAX_FILE_BYTES} bytes"])
    loader = None
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()
        if root is None or root.tag == _NULL:
            return {}
        return _Walk(path, loader, sections).open(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError([f"{place}: not YAML: {error.problem}"]) from error
    except (yaml.YAMLError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError([f"{path}: not YAML: {' '.join(why.split())}"]) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Walk:
    """Goes through the YAML nodes of one file, and collects the values by key path. Lifetime: one
    reading of the file.
    """

    def __init__(self, path: Path, loader: yaml.SafeLoader, sections: Collection[str]) -> None:
        self._path = path
        self._loader = loader
        self._sections = sections
        self._found: dict[str, Given] = {}
        self._problems: list[str] = []

    def open(self, root: yaml.Node) -> dict[str, Given]:
        self._mapping(root, "")
        if self._problems:
            raise ConfigError(self._problems)
        return self._found

    def _mapping(self, node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            what = f"{prefix[:-1]} must be" if prefix else "the file must be"
            self._problems.append(f"{self._place(node)}: {what} a mapping of keys to values")
            return
        seen: set[str] = set()
        for key_node, value_node in node.value:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if name is None or name in seen:
                what = "a key must be text" if name is None else f"{prefix}{name} is given twice"
                self._problems.append(f"{self._place(key_node)}: {what}")
                continue
            seen.add(name)
            if not prefix and name in self._sections:
                if value_node.tag != _NULL:  # a section without any key
                    self._mapping(value_node, f"{name}.")
                continue
            try:
                value = self._loader.construct_object(value_node, deep=True)
            except ValueError as error:  # such as a date in a thirteenth month
                self._problems.append(f"{self._place(key_node)}: {prefix}{name}: {error}")
                continue
            items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
            places = tuple(self._place(item) for item in items)
            self._found[f"{prefix}{name}"] = Given(value, self._place(key_node), places)

    def _place(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"
