"""How a command line is parsed, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console

from engine.profiles import profile
from policies.load import PolicyError, load
from simulator.live.client import FIRST_TOKEN_ID

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


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def share(text: str) -> float:
    """A share in [0, 1)."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: 0 or more and below 1")
    return value


def count(text: str) -> int:
    """A whole number of 1 or more; 300k and 2M are understood."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return value


def at_most(most: int) -> Callable[[str], int]:
    """A whole number from 1 to `most`."""

    def read(text: str) -> int:
        value = count(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text}: {most} at most")
        return value

    return read


def capacity(text: str) -> int | None:
    """A count of tokens, or inf: None."""
    return None if text == "inf" else count(text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 or more")
    return value


def port(text: str) -> int:
    """A port, or 0: the system picks."""
    value = _whole(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to 65535")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _whole(text: str) -> int:
    digits, factor = text, 1
    if text[-1:] in ("k", "M"):
        digits, factor = text[:-1], {"k": 1_000, "M": 1_000_000}[text[-1]]
    try:
        value = float(digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value != value or abs(value) == float("inf") or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


REQUESTS, GROUPS, RATE_PER_S, OUTPUT_TOKENS, SEED = 100, 1, 10.0, 32, 1
BLOCK_TOKENS = 512

OF_A_TRACE = ("seconds", "spread", "block_tokens")
OF_A_SHARED_PREFIX = ("groups", "rate", "output_tokens", "seed")
OF_AN_OPEN_LOOP = ("rate", "speed", "spread")


class UsageError(ValueError):
    """The command line asks for something that cannot be done; says what would do."""


def check_load(options: argparse.Namespace) -> None:
    """Raises `UsageError` for a load that cannot be sent, or whose results could not be kept."""
    if options.trace is None:
        _refuse(options, OF_A_TRACE, "is for --trace, and this load is made by --shared-prefix")
    else:
        _refuse(options, OF_A_SHARED_PREFIX, "is for --shared-prefix; a trace brings its own")
    if options.concurrency is not None:
        _refuse(
            options,
            OF_AN_OPEN_LOOP,
            "sets times of arrival, which a closed loop (--concurrency) has none of",
        )
    if options.vocabulary <= FIRST_TOKEN_ID:
        raise UsageError(f"--vocabulary {options.vocabulary}: must be above {FIRST_TOKEN_ID}")
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is not None:
            check_file(option, path)


def check_stack(options: argparse.Namespace) -> None:
    """Raises `UsageError` for a stack that could not start, or a report that could not be kept."""
    if options.trace is None:
        _refuse(options, ("requests", *OF_A_TRACE), "is for --trace, and there is none")
    if options.port and options.port == options.admin_port:
        raise UsageError(f"--port and --admin-port are both {options.port}; choose two")
    check_profile(options.profile)
    check_policy(options.policy)
    check_folder("--out", options.out)


def base_url(text: str) -> str:
    """`text` without the `/v1` that some clients want and this one adds; raises `UsageError`."""
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise UsageError(f"URL {text!r}: expected http://HOST:PORT")
    return url


def check_profile(name: str) -> None:
    """Raises `UsageError` for a profile that is not there."""
    try:
        profile(name)
    except ValueError as error:
        raise UsageError(f"--profile: {error}") from error


def check_policy(spec: str) -> None:
    """Raises `UsageError` for a policy that cannot be loaded."""
    try:
        load(spec)
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}; leave one of the two out")


def check_file(option: str, path: Path) -> None:
    """Raises `UsageError` for a file that could not be written when all is done."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written; name a file that may")


def check_files(options: argparse.Namespace, names: Sequence[str], read: Sequence[str]) -> None:
    """Raises `UsageError` unless the files to write can be, and are neither one another nor read.

    `names` are options with a file to write or None, `read` what the command may read.
    """
    files = [name for name in read if Path(name).is_file()]
    taken = {Path(name).resolve(): f"{name} is read by this command" for name in files}
    for name in names:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        option = f"--{name}"
        check_file(option, path)
        if path.resolve() in taken:
            raise UsageError(f"{option} {path}: {taken[path.resolve()]}; name another file")
        taken[path.resolve()] = f"{option} writes it, too"


def check_folder(option: str, path: Path) -> None:
    """Makes the folder; raises `UsageError` where it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be made ({error.strerror}); name another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: may not be written to; name another folder")
