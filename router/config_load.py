"""One configuration out of flags, environment and file, each value checked and traced."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from router.config import Config
from router.config_file import SECTIONS, ConfigError, Given, read_file
from router.config_keys import FILE_VARIABLE, PREFIX, Key, keys_of, value_at
from router.config_rules import FIXED, check_together, check_value

# Kubernetes gives every container such variables for a service called "warmroute".
_SERVICE_LINK = re.compile(r"WARMROUTE_(SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_SERVICE_LINK_PORT = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each of its values comes from. Lifetime: until a reload."""

    config: Config
    sources: Mapping[str, str]  # key path -> "default", "file:line", "flag --x" or a variable


def load_config(args: argparse.Namespace, environ: Mapping[str, str]) -> Loaded:
    """Flags of `add_flags` over environment over file (`--config`) over defaults.

    Raises ConfigError with every problem found: unknown keys, values out of range, values that
    contradict each other; each with the key's path, its source and what is allowed.
    """
    keys = keys_of()
    file = getattr(args, "config", None) or environ.get(FILE_VARIABLE)
    problems: list[str] = []
    given = {path: Given(key.default, "default") for path, key in keys.items()}
    from_file = read_file(Path(file)) if file else {}
    for path, one in from_file.items():
        if path not in keys:
            problems.append(f"{one.source}: {_unknown(path, keys)}")
    given |= {path: one for path, one in from_file.items() if path in keys}
    given |= _from_environment(keys, environ, problems)
    given |= _from_flags(keys, args)
    values: dict[str, Any] = {}
    for path, one in given.items():
        try:
            values[path] = _value_of(keys[path], one)
        except ValueError as error:
            allowed = keys[path].allowed
            problems.append(f"{one.source}: {path}: {error}; allowed: {allowed}")
    if problems:
        raise ConfigError(problems)
    config = _assemble(values)
    if contradictions := check_together(config):
        raise ConfigError(contradictions)
    return Loaded(config, {path: one.source for path, one in given.items()})


def reloadable(old: Config, new: Config) -> tuple[list[str], dict[str, str]]:
    """What differs: paths that can change while running; and those that cannot, with why."""
    changed = [path for path in keys_of() if value_at(old, path) != value_at(new, path)]
    applied = [path for path in changed if path not in FIXED]
    return applied, {path: FIXED[path] for path in changed if path in FIXED}


def _value_of(key: Key, given: Given) -> Any:
    if given.source == "default":
        return given.value
    value = given.value
    if key.is_list and not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list, got {type(value).__name__}")
    return check_value(key, value)


def _from_environment(
    keys: Mapping[str, Key], environ: Mapping[str, str], problems: list[str]
) -> dict[str, Given]:
    by_variable = {key.variable: key for key in keys.values()}
    found: dict[str, Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or _is_link(variable, text):
            continue
        key = by_variable.get(variable)
        if key is None:
            close = difflib.get_close_matches(variable, by_variable, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{variable}: no such key{hint}")
            continue
        found[key.path] = Given(text.split() if key.is_list else text, variable)
    return found


def _from_flags(keys: Mapping[str, Key], args: argparse.Namespace) -> dict[str, Given]:
    return {
        path: Given(value, f"flag {key.flag}")
        for path, key in keys.items()
        if (value := getattr(args, key.attribute, None)) is not None
    }


def _assemble(values: Mapping[str, Any]) -> Config:
    nested: dict[str, Any] = {section: {} for section in SECTIONS}
    for path, value in values.items():
        section, dot, name = path.rpartition(".")
        (nested[section] if dot else nested)[name] = value
    return msgspec.convert(nested, Config)


def _is_link(variable: str, text: str) -> bool:
    if variable == f"{PREFIX}PORT":
        return _SERVICE_LINK_PORT.match(text) is not None
    return _SERVICE_LINK.fullmatch(variable) is not None


def _unknown(path: str, keys: Mapping[str, Key]) -> str:
    close = difflib.get_close_matches(path, keys, n=1)
    if not close:  # right name, wrong section
        name = path.rpartition(".")[2]
        close = [other for other in keys if other.rpartition(".")[2] == name]
    hint = f"; did you mean {close[0]}?" if close else f"; keys: {', '.join(keys)}"
    return f"unknown key {path}{hint}"


def effective_yaml(loaded: Loaded) -> str:
    """The whole configuration as a file, each line with its source. It loads as the same."""
    lines: list[str] = []
    section = ""
    for path in keys_of():
        where, _, name = path.rpartition(".")
        if where != section:
            lines.append(f"{where}:")
            section = where
        value = value_at(loaded.config, path)
        shown = msgspec.json.encode(value).decode()
        indent = "  " if where else ""
        lines.append(f"{indent}{name}: {shown}  # {loaded.sources[path]}")
    return "\n".join(lines) + "\n"
