"""Reads `NAME?key=value&key=value`: the options of formats and generators, checked by a struct."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from random import Random
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import inspect

from simulator.traces.job import TraceError

MAX_SIZE = 4 << 20
MAX_SIGMA = 3.0  # of a log-normal one: above it one draw in a thousand is 10,000 times the median
SHAPE = re.compile(r"(\d+)(?:(~|\.\.)(\d+)|(\*)(\d(?:\.\d+)?))?")


class Size:
    """A number of tokens or turns, fixed or drawn from a distribution.

    `1200` is fixed; `1200~360` is normal with this mean and deviation, rounded; `2..20` is uniform;
    `700*0.6` is log-normal with this median and sigma, rounded. Draws are at least 1, or at least 0
    if `mean` is 0, for things that may be absent. Immutable. Lifetime: process.
    """

    __slots__ = ("kind", "mean", "other")

    def __init__(self, mean: int, kind: str = "", other: float = 0) -> None:
        self.mean = mean  # or the lower end, or the median
        self.kind = kind  # "", "~", ".." or "*"
        self.other = other  # the deviation, the upper end, or sigma

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read one of the four forms. Raises ValueError for any other text."""
        match = SHAPE.fullmatch(text)
        if match is None or max(map(int, filter(None, match.group(1, 3)))) > MAX_SIZE:
            raise ValueError(
                "expected 1200, mean~deviation as 1200~360, low..high as 2..20 or median*sigma as "
                f"700*0.6, to {MAX_SIZE}"
            )
        if match[4]:
            if float(match[5]) > MAX_SIGMA:
                raise ValueError(f"expected median*sigma with sigma at most {MAX_SIGMA:g}")
            return cls(int(match[1]), "*", float(match[5]))
        size = cls(int(match[1]), match[2] or "", int(match[3] or 0))
        if size.kind == ".." and size.other < size.mean:
            raise ValueError("expected low..high with low not above high")
        return size

    def __str__(self) -> str:
        return f"{self.mean}{self.kind}{self.other:g}" if self.kind else str(self.mean)

    @property
    def fixed(self) -> bool:
        """True if every draw gives the same value."""
        return not self.kind

    @property
    def most(self) -> int:
        """An upper bound of draws, which one in a thousand million normal or log-normal draws
        exceeds.
        """
        if self.kind == "*":
            return min(MAX_SIZE, math.ceil(self.mean * math.exp(6 * self.other)))
        return int(self.other if self.kind == ".." else self.mean + 6 * self.other)

    def draw(self, random: Random) -> int:
        """Draw one value; a fixed size uses no random number."""
        if not self.kind:
            return self.mean
        if self.kind == "..":
            return random.randint(self.mean, int(self.other))
        if self.kind == "*":
            drawn = round(self.mean * math.exp(random.gauss(0.0, self.other)))
        else:
            drawn = round(random.gauss(self.mean, self.other))
        return min(MAX_SIZE, max(1 if self.mean else 0, drawn))


S = TypeVar("S", bound=msgspec.Struct)


def name_of(spec: str) -> str:
    """Return the part of a specification before the question mark."""
    return unquote(spec.partition("?")[0])


def parse_options(spec: str, kind: type[S]) -> S:
    """Return the options in `spec` as a `kind`; keys that are not named have their defaults.

    Raises `TraceError` for an unknown key (with the valid ones) and for a bad value.
    """
    name, _, query = spec.partition("?")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    values: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        key = unquote(key)
        if key not in known:
            expected = ", ".join(sorted(known)) or "none"
            raise TraceError(f"{name}: unknown key {key!r}; valid ones: {expected}")
        if not equals or key in values:
            raise TraceError(f"{name}: {pair!r}: expected each key once, as key=value")
        values[key] = unquote(value)
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_size)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)", str(error))
        key = where[1] if where else "?"
        raise TraceError(f"{name}: {key}={values.get(key, '')}: {error}") from error


def _size(kind: type, value: Any) -> Any:
    # A TypeError would look like an error of the user.
    assert kind is Size, f"an option is a {kind.__name__}, which is not read from text"
    return Size.parse(str(value))


def option_rows(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of each option, for help texts."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        about = field.type
        meaning = ""
        if isinstance(about, inspect.Metadata):
            meaning = (about.extra_json_schema or {}).get("description", "")
        default = "" if field.default is None else _text(field.default)
        yield field.encode_name, default, meaning


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
