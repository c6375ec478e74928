"""A command of `warmroute-sim`: its parser, in one style for all, and what it calls."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from importlib import import_module
from textwrap import fill
from typing import Any

from rich.console import Console

HELP_COLUMNS = 88

# What runs real programs is a coroutine; what computes is not, and may take all of a core.
Command = Callable[[argparse.Namespace, Console], "bool | Coroutine[Any, Any, bool]"]


def add_command(
    parsers: Any,
    name: str,
    usage: str,
    about: str,
    description: str,
    examples: str = "",
    **kept: Any,
) -> argparse.ArgumentParser:
    """A parser whose help is short where argparse's is long: `usage` instead of all options.

    `about` stands in the list of commands, `examples` below the options, as they are.
    """
    parser: argparse.ArgumentParser = parsers.add_parser(
        name,
        usage=f"%(prog)s {usage}",
        help=about,
        description=fill(description, HELP_COLUMNS),
        epilog=examples or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **kept,
    )
    return parser


def from_module(module: str, function: str) -> Callable[[], Command]:
    """Gets `function` when called, its module imported only then: some take a second."""

    def get() -> Command:
        command: Command = getattr(import_module(module), function)
        return command

    return get
