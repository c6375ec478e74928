"""Loads the configuration from flags, environment and the YAML file, and checks each value."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from policies.near import nearest
from router.config.file import ConfigError, Given, read_file
from router.config.items import BadItemsError
from router.config.keys import (
    FILE_VARIABLE,
    PREFIX,
    ConfigKey,
    attribute_of,
    flag_of,
    keys_of,
    value_at,
    variable_of,
)
from router.engines.worker_spec import url_note
from router.redis.url import redacted
from router.settings.groups import groups
from router.settings.reload import FIXED, REMOVED, STANDING
from router.settings.rules import NAMES, check_together, check_value
from router.settings.schema import Config

SECTIONS = frozenset(
    field.name
    for field in msgspec.structs.fields(Config)
    if field.default_factory is not msgspec.NODEFAULT
)
_OLD_SECTIONS = frozenset(path.partition(".")[0] for path in REMOVED if "." in path)
_COMMENT_COLUMNS = 100

# Kubernetes gives every container such variables for a service called "warmroute".
_SERVICE_LINK = re.compile(r"WARMROUTE_(SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_SERVICE_LINK_PORT = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for each of its values the source that gave it. Lifetime: until a
    reload.
    """

    config: Config
    sources: Mapping[str, str]  # key path -> "default", "file:line", "flag --x" or a variable
    notes: tuple[str, ...] = ()  # values that were read in another form than the written one


def load_config(args: argparse.Namespace, environ: Mapping[str, str]) -> Loaded:
    """Return the configuration. Flags of `add_flags` override the environment, which overrides the
    file (`--config`), which overrides defaults.

    Raises ConfigError with every problem found: unknown keys, values out of range, contradictory
    values; each with the key's path, its source and the allowed values.
    """
    keys = keys_of(Config)
    file = getattr(args, "config", None) or environ.get(FILE_VARIABLE)
    problems: list[str] = []
    given = {path: Given(key.default, "default") for path, key in keys.items()}
    from_file = read_file(Path(file), SECTIONS | _OLD_SECTIONS) if file else {}
    layers = (from_file, _from_environment(keys, environ), _from_flags(keys, args))
    for layer in layers:
        given |= {path: one for path, one in layer.items() if path in keys}
    values = {path: one.value for path, one in given.items()}
    for layer in layers:
        for path, one in layer.items():
            if path not in keys:
                problems.append(f"{one.source}: {_unknown(path, one.source, keys)}")
            elif given[path] is one:  # not a value that a nearer layer replaces
                values[path] = _checked(keys[path], one, problems)
    if problems:
        raise ConfigError(problems)
    config = _assemble(values)
    if contradictions := check_together(config):
        raise ConfigError(contradictions)
    sources = {path: one.source for path, one in given.items()}
    return Loaded(config, sources, _notes(given["workers"], config))


def _notes(workers: Given, config: Config) -> tuple[str, ...]:
    """Return a note for each worker for whose URL the router uses another form than the configured
    one.
    """
    pairs = zip(workers.value, config.workers, strict=True)
    notes = (url_note(written, spec.partition(",")[0]) for written, spec in pairs)
    return tuple(f"{workers.source_of(at)}: {note}" for at, note in enumerate(notes) if note)


def reloadable(old: Config, new: Config) -> tuple[list[str], dict[str, str]]:
    """Return the keys whose change a reload can make, and those whose change it cannot make, with
    the reason.
    """
    changed = [path for path in keys_of(Config) if value_at(old, path) != value_at(new, path)]
    refused = {path: FIXED[path] for path in changed if path in FIXED}
    for path, why in STANDING.items():
        if path in changed and None in (value_at(old, path), value_at(new, path)):
            refused[path] = why
    return [path for path in changed if path not in refused], refused


def without(refused: Iterable[str], new: Config, old: Config) -> Config:
    """Return the configuration `new` with the values of `old` for the `refused` keys, whose old
    values stay in use.
    """
    for path in refused:
        section, dot, name = path.rpartition(".")
        kept = {name: value_at(old, path)}
        if dot:
            kept = {section: msgspec.structs.replace(getattr(new, section), **kept)}
        new = msgspec.structs.replace(new, **kept)
    return new


def _checked(key: ConfigKey, given: Given, problems: list[str]) -> Any:
    """Return a value in the type of its key. If it is unusable, return None and append the reason
    to `problems`.
    """
    try:
        mapped = key.path in NAMES and isinstance(given.value, dict)
        if key.is_list and not mapped and not isinstance(given.value, (list, tuple)):
            raise ValueError(f"must be a list, got {type(given.value).__name__}")
        return check_value(key, given.value)
    except BadItemsError as error:
        for item, text in error.problems.items():
            problems.append(f"{given.source_of(item)}: {key.path}[{item}]: {text}")
    except ValueError as error:
        problems.append(f"{given.source}: {key.path}: {error}")
    return None


def _from_environment(
    keys: Mapping[str, ConfigKey], environ: Mapping[str, str]
) -> dict[str, Given]:
    """Return the values of environment variables by key path; a variable without a key is kept
    under its own name.
    """
    by_variable = {key.variable: key for key in keys.values()}
    found: dict[str, Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or _is_link(variable, text):
            continue
        key = by_variable.get(variable)
        if key is None:
            found[variable] = Given(text, variable)
        else:
            found[key.path] = Given(text.split() if key.is_list else text, variable)
    return found


def _from_flags(keys: Mapping[str, ConfigKey], args: argparse.Namespace) -> dict[str, Given]:
    return {
        path: Given(value, f"flag {keys[path].flag if path in keys else flag_of(path)}")
        for path in (*keys, *REMOVED)
        if (value := getattr(args, attribute_of(path), None)) is not None
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


def _unknown(path: str, source: str, keys: Mapping[str, ConfigKey]) -> str:
    for removed, instead in REMOVED.items():
        if path in (removed, variable_of(removed)):
            return f"{removed}: {instead}"
    if path == source:  # a variable
        variable = nearest(path, (FILE_VARIABLE, *(key.variable for key in keys.values())))
        return f"no such key; did you mean {variable}?" if variable else "no such key"
    section, _, name = path.rpartition(".")
    split = {other: other.rpartition(".") for other in keys}
    known = {parts[2]: other for other, parts in split.items()}
    siblings = {parts[2]: other for other, parts in split.items() if parts[0] == section}
    if not section:
        siblings |= {name: name for name in sorted(SECTIONS)}
    for names in (siblings, known):
        # The right name in another section is nearer than a similar one in this.
        near = name if name in known else nearest(name, names)
        if near is not None:
            return f"unknown key {path}; did you mean {(known | names)[near]}?"
    of_section = f" of {section}" if section in SECTIONS else ""
    return f"unknown key {path}; keys{of_section}: {', '.join(siblings)}"


def effective_yaml(loaded: Loaded) -> str:
    """Return the whole configuration as a YAML file, in which each key follows its description and
    is followed by its source.

    Loading the file gives the same configuration, except for the password in `state`, which is
    written as `***`.
    """
    keys = keys_of(Config)
    lines = ["# The configuration in force. Behind each value stands where it comes from."]
    for group in groups():
        section = group.paths[0].rpartition(".")[0]
        lines += ["", *_comment(group.about if section else f"{group.title}: {group.about}", "")]
        lines += [f"{section}:"] if section else []
        indent = "  " if section else ""
        for path in group.paths:
            value = value_at(loaded.config, path)
            if path == "state" and value is not None:
                value = redacted(value)
            shown = msgspec.json.encode(value).decode()
            lines += _comment(keys[path].help, indent)
            lines.append(f"{indent}{path.rpartition('.')[2]}: {shown}  # {loaded.sources[path]}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text,
        _COMMENT_COLUMNS,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )
