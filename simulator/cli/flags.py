"""Makes command-line flags and help from Structs: a command's options are one Struct.

A field with a help text becomes a flag, a field that is a Struct becomes a section of flags, and
any other field keeps its default. `Annotated[int | None, "N", "the help"]` also names the
placeholder of the value; else it follows from the type and the unit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

import msgspec
from msgspec import UnsetType
from rich.console import Console

HELP_COLUMNS = 88

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


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
    if not isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _reader(read: Callable[[str], T], fits: Callable[[T], bool], what: str) -> Callable[[str], T]:
    """Return a function that reads a value from a text and checks it with `fits`; its error is the
    text followed by `what`.
    """

    def checked(text: str) -> T:
        value = read(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text}{what}")
        return value

    return checked


positive = _reader(_number, lambda value: 0 < value < inf, " is not a number above 0")
not_negative = _reader(_number, lambda value: 0 <= value < inf, " is not a number of 0 or more")
share = _reader(_number, lambda value: 0 <= value < 1, " is not a share: 0 or more and below 1")
# 300k and 2M are understood.
count = _reader(_whole, lambda value: value >= 1, " is not a whole number of 1 or more")
whole = _reader(_whole, lambda value: value >= 0, " is not a whole number of 0 or more")
port = _reader(_whole, lambda value: 0 <= value <= 65_535, " is not a port, 0 to 65535")


def at_most(most: int) -> Callable[[str], int]:
    """Return a function that reads a whole number from 1 to `most`."""
    return _reader(count, lambda value: value <= most, f": {most} at most")


def capacity(text: str) -> int | None:
    """Return the number of tokens that a text has, or None for "inf"."""
    return None if text == "inf" else count(text)


@dataclass(frozen=True, slots=True)
class Group:
    """The title of a group of flags in the help. Lifetime: process."""

    title: str

    def made_in(self, parser: Any) -> Any:
        """Add the group to `parser`, and return the container for its flags."""
        return parser.add_argument_group(self.title)


@dataclass(frozen=True, slots=True)
class Either:
    """The common name of flags that exclude each other. Lifetime: process."""

    name: str
    required: bool = False

    def made_in(self, parser: Any) -> Any:
        """Add the group to `parser`, and return the container for its flags."""
        return parser.add_mutually_exclusive_group(required=self.required)


@dataclass(frozen=True, slots=True)
class Place:
    """Marks a positional argument, which is given without a flag. Lifetime: process."""

    many: str | None = None  # argparse's nargs


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks an option whose text must be one of these values. Lifetime: process."""

    values: tuple[str, ...]


# A plain int is 1 or more, a plain float above 0, and a share where its name says so.
Whole = Annotated[int, whole]
NotNegative = Annotated[float, not_negative]
Share = Annotated[float, share]
Port = Annotated[int, port]  # 0: the system picks
Written = Annotated[Path | None, Group("files to write")]
_READERS: Mapping[type, Callable[[str], Any]] = {int: count, float: positive, str: str, Path: Path}
_METAVARS = {"ms": "MS", "s": "S", "seconds": "S", "gbps": "G", "gib": "G", "share": "SHARE"}


def add_flags(
    parser: Any, struct: type[msgspec.Struct], made: dict[object, Any] | None = None
) -> None:
    """Add a flag for each field of `struct` that has a help text, and for those of its sections.

    `made` has the groups of flags that exist already.
    """
    made = {} if made is None else made
    for field, kind, marks in _fields(struct):
        container = parser
        for mark in marks:
            if isinstance(mark, Group | Either):
                if mark not in made:
                    made[mark] = mark.made_in(container)
                container = made[mark]
        if _is_section(kind):
            add_flags(container, kind, made)
        elif marks:
            _add_flag(container, field, kind, marks)


def options_of(struct: type[S], given: Mapping[str, Any]) -> S:
    """Return a `struct` with the values that argparse has read."""
    values: dict[str, Any] = {}
    for field, kind, marks in _fields(struct):
        if _is_section(kind):
            values[field.name] = options_of(kind, given)
        elif marks:
            value = given[field.name]
            values[field.name] = tuple(value or ()) if get_origin(kind) is tuple else value
    return struct(**values)


def given_flags(options: msgspec.Struct) -> Iterator[str]:
    """Yield the flags that reproduce these options; options with their default are left out."""
    for field, kind, marks in _fields(type(options)):
        value = getattr(options, field.name)
        if _is_section(kind):
            yield from given_flags(value)
        elif value != field.default and not any(isinstance(mark, Place) for mark in marks):
            several = value if isinstance(value, tuple) else (value,)
            yield from (_flag(field) if one is True else f"{_flag(field)}={one}" for one in several)


def _add_flag(
    container: Any, field: msgspec.structs.FieldInfo, kind: Any, marks: tuple[Any, ...]
) -> None:
    *metavar, text = [mark for mark in marks if isinstance(mark, str)]
    default = None if field.required else field.default
    how: dict[str, Any] = {"help": _help(text, default)}
    if kind is bool:
        container.add_argument(_flag(field), action="store_true", **how)
        return
    if several := get_origin(kind) is tuple:
        kind, more = _unwrapped(get_args(kind)[0])
        marks += more
    if get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    else:
        usual = share if field.name.endswith("_share") else _READERS.get(kind)
        how["type"] = next((mark for mark in marks if callable(mark)), usual)
        how["metavar"] = metavar[0] if metavar else _metavar(field.name, kind)
        how["choices"] = next((mark.values for mark in marks if isinstance(mark, OneOf)), None)
    if places := [mark for mark in marks if isinstance(mark, Place)]:
        container.add_argument(field.name, nargs=places[0].many, **how)
    elif several:
        container.add_argument(_flag(field), action="append", **how)
    else:
        container.add_argument(_flag(field), required=field.required, default=default, **how)


def _flag(field: msgspec.structs.FieldInfo) -> str:
    return "--" + field.name.replace("_", "-")


def _metavar(name: str, kind: type) -> str:
    if kind is float:
        return _METAVARS[name.rpartition("_")[2]]
    return {int: "N", Path: "FILE"}[kind]


def _help(text: str, default: object) -> str:
    if default and "default" not in text:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        text = f"{text}; default {shown}".removeprefix("; ")
    return text.replace("%", "%%")


def _fields(
    struct: type[msgspec.Struct],
) -> Iterator[tuple[msgspec.structs.FieldInfo, Any, tuple[Any, ...]]]:
    """Yield each field of the struct in order, with its type and its marks."""
    hints = hints_of(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        yield field, *_unwrapped(hints[field.name])


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without `Annotated`, `| None` and `| UnsetType`, and all marks of
    `Annotated`.
    """
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        kind, more = _unwrapped(inner)
        return kind, (*marks, *more)
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg not in (NoneType, UnsetType))
        return _unwrapped(inner)
    return hint, ()


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# A command that runs real programs is a coroutine; one that only computes is a plain function.
Run = Callable[[Any, Console], "bool | Coroutine[Any, Any, bool]"]


class Command(NamedTuple):
    """One command: its function, its options and the texts of its help."""

    run: Run
    options: type[msgspec.Struct]
    usage: str
    examples: str

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's description, examples and flags to `parser`, with a short
        usage line.
        """
        parser.usage = f"%(prog)s {self.usage}"
        parser.description = fill(" ".join((self.run.__doc__ or "").split()), HELP_COLUMNS)
        parser.epilog = self.examples or None
        add_flags(parser, self.options)


def command(usage: str, examples: str = "") -> Callable[[Run], Command]:
    """Make a command of a function: its docstring is the description, `options` has the flags.

    The help shows `usage` in place of all options, and `examples` below them, unchanged.
    """

    def made(run: Run) -> Command:
        return Command(run, hints_of(run)["options"], usage, examples)

    return made
