"""Flags for every key of the configuration, `warmroute config`, and the table of keys in the docs.

`python -m router.cli.config docs/reference/configuration.md` writes the table. It is
generated, so that it cannot disagree with the Structs; a test keeps it current.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from router.cli.convert import MAX_CHARACTERS, PeerCommandError, convert
from router.config.file import ConfigError
from router.config.keys import FILE_VARIABLE, ConfigKey, attribute_of, flag_of, keys_of, text_of
from router.settings.groups import MAIN, groups
from router.settings.load import Loaded, effective_yaml, load_config
from router.settings.reload import FIXED, REMOVED, STANDING
from router.settings.schema import Config

PICKER_PORT = 9002  # as gateways' charts and guides have it
NAMES_OF_KEYS = """\
Each flag is also a key of the file and an environment variable. --admin-port is `admin_port: 8081`
and WARMROUTE_ADMIN_PORT; --limits-hold-s is `hold_s` in the section `limits:`. A flag wins over a
variable, and a variable over the file.
"""


class _HelpAll(argparse.Action):
    """Handles the flag `--help-all`: prints every flag, grouped by section, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        whole = argparse.ArgumentParser(
            prog=parser.prog,
            usage=parser.usage,
            description="Every flag of `warmroute serve`. `warmroute serve --help` shows the main "
            "ones.\n\n" + NAMES_OF_KEYS,
            formatter_class=parser.formatter_class,
            add_help=False,
        )
        _add_all(whole)
        whole.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every key; `--help` shows the main ones (`MAIN`), by group.

    Values stay text: `load_config` checks them all.
    """
    _add_config(parser)
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, help="show all flags, grouped by section"
    )
    keys, shown = keys_of(Config), {path for group in MAIN for path in group.paths}
    for group in MAIN:
        place = parser.add_argument_group(group.title)
        for path in group.paths:
            _add_flag(place, keys[path], _brief(keys[path]))
    for path, key in keys.items():
        if path not in shown:
            _add_flag(parser, key, argparse.SUPPRESS)
    _add_picker(parser, argparse.SUPPRESS)
    for path in REMOVED:  # not shown; `load_config` says what to write instead
        parser.add_argument(flag_of(path), dest=attribute_of(path), help=argparse.SUPPRESS)


def _add_all(parser: argparse.ArgumentParser) -> None:
    keys = keys_of(Config)
    _add_config(parser)
    for group in groups():
        place = parser.add_argument_group(group.title, group.about)
        for path in group.paths:
            _add_flag(place, keys[path], _full(keys[path]))
        if "picker.port" in group.paths:
            _add_picker(place, f"the same as --picker-port {PICKER_PORT}")


def _add_config(place: argparse._ActionsContainer) -> None:
    place.add_argument(
        "--config", metavar="FILE", help=f"YAML file of all settings [env {FILE_VARIABLE}]"
    )


def _add_picker(place: argparse._ActionsContainer, about: str) -> None:
    place.add_argument(
        "--picker", dest="picker_port", action="store_const", const=str(PICKER_PORT), help=about
    )


def _add_flag(place: argparse._ActionsContainer, key: ConfigKey, about: str) -> None:
    place.add_argument(
        key.flag,
        dest=key.attribute,
        metavar=key.metavar,
        action="append" if key.is_list else "store",
        help=about.replace("%", "%%") if about != argparse.SUPPRESS else about,
    )


def _brief(key: ConfigKey) -> str:
    if key.is_list:
        return f"{key.help}; may be repeated"
    return key.help if key.default is None else f"{key.help} (default {text_of(key.default)})"


def _full(key: ConfigKey) -> str:
    repeat = "; may be repeated" if key.is_list else ""
    return (
        f"{key.help}{repeat} (default {text_of(key.default)}; {key.allowed}) [env {key.variable}]"
    )


def add_config_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute config`."""
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="check whether the router can use FILE (with the flags and the environment)",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        help="print all keys, with the meaning, the value and the source of each key",
    )
    parser.add_argument(
        "--from",
        dest="peer_command",
        metavar="COMMAND",
        help="print the configuration that does what another router's command line COMMAND does "
        "(sglang-router, smg, vllm-router, production-stack); -: read COMMAND from stdin",
    )
    add_flags(parser)


def check_command(args: argparse.Namespace) -> int:
    """Run `warmroute config`. Return 0 if the configuration is valid; otherwise print its problems
    and return 2.
    """
    if args.peer_command is not None:
        return _from_peer(args.peer_command)
    if args.check is not None:
        args.config = args.check
    try:
        loaded = load_config(args, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    print(effective_yaml(loaded) if args.print else _summary(loaded), end="")
    return 0


def _from_peer(command: str) -> int:
    """Run `warmroute config --from`: print the converted file on stdout, and the flags that it
    lacks on stderr.
    """
    if command == "-":
        command = sys.stdin.read(MAX_CHARACTERS + 1)
    try:
        converted = convert(command)
        with NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(converted.text)
            file.flush()
            load_config(argparse.Namespace(config=file.name), {})
    except PeerCommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ConfigError as error:  # flags that contradict one another
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    print(converted.text, end="")
    print(converted.summary(), end="", file=sys.stderr)
    return 0


def _summary(loaded: Loaded) -> str:
    given = sum(source != "default" for source in loaded.sources.values())
    count = len(loaded.config.workers)
    return f"ok: {given} of {len(loaded.sources)} keys given, {count} workers\n"


BEGIN = "<!-- keys: generated by router.cli.config, do not edit -->\n"
END = "<!-- keys: end -->\n"


def key_table() -> str:
    """Return a Markdown table of all keys: meaning, default, allowed values, reload."""
    lines = ["| key | meaning | default | allowed | reload |", "|---|---|---|---|---|"]
    lines += [_row(key) for key in keys_of(Config).values()]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return `text` with the table between its two marks. Raises ValueError if a mark is
    missing.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN.strip()} and {END.strip()} are missing")
    return f"{head}{BEGIN}\n{key_table()}\n{END}{tail}"


def _row(key: ConfigKey) -> str:
    reload = "no" if key.path in FIXED else "yes"
    if key.path in STANDING:
        reload = "to another; not from none or to none"
    default = "(none)" if key.is_list else f"`{text_of(key.default)}`"
    return f"| `{key.path}` | {key.help} | {default} | {key.allowed} | {reload} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
