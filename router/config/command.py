"""The configuration on the command line: flags for every key, and `warmroute config`."""

from __future__ import annotations

import argparse
import os
import sys

from router.config.file import ConfigError
from router.config.keys import FILE_VARIABLE, attribute_of, flag_of, keys_of, text_of
from router.config.load import Loaded, effective_yaml, load_config
from router.config.rules import REMOVED


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--config` and a flag for every key. Values stay text: `load_config` checks them all."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of the keys below [env {FILE_VARIABLE}]"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in keys_of().values():
        section = key.path.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "main keys")
        repeat = "; may be repeated" if key.is_list else ""
        help_text = (
            f"{key.help}{repeat} (default {text_of(key.default)}; {key.allowed}) "
            f"[env {key.variable}]"
        )
        groups[section].add_argument(
            key.flag,
            dest=key.attribute,
            metavar="SPEC" if key.path in ("workers", "policy") else "X",
            action="append" if key.is_list else "store",
            help=help_text.replace("%", "%%"),
        )
    for path in REMOVED:  # not shown; `load_config` says what to write instead
        parser.add_argument(flag_of(path), dest=attribute_of(path), help=argparse.SUPPRESS)


def add_config_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `warmroute config`."""
    parser.add_argument(
        "--check", metavar="FILE", help="say whether FILE (and flags, environment) can be used"
    )
    parser.add_argument(
        "--print", action="store_true", help="print what would be in force, with sources"
    )
    add_flags(parser)


def check_command(args: argparse.Namespace) -> int:
    """`warmroute config`: 0 when the configuration can be used, 2 with the problems when not."""
    if args.check is not None:
        args.config = args.check
    try:
        loaded = load_config(args, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    print(effective_yaml(loaded) if args.print else _summary(loaded), end="")
    return 0


def _summary(loaded: Loaded) -> str:
    given = sum(source != "default" for source in loaded.sources.values())
    count = len(loaded.config.workers)
    return f"ok: {given} of {len(loaded.sources)} keys given, {count} workers\n"
