"""What a sweep varies: names of axes, and the values that a list or a range stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from simulator.replay.setup import Goodput, RouterSettings, WorkerGroup, World
from simulator.sweep.errors import SweepError, unknown

Scalar = str | int | float | bool | None
Path = tuple[str, ...]  # into the plain form of a set-up; "groups" is the one group of the fleet

DIGITS = 6  # significant ones of a number from a range: readable, and equal on any machine
KINDS = ("int", "linear", "log")
MAX_VALUES = 10_000  # of one axis

SHORT_NAMES: Mapping[str, Path] = {
    "workers": ("groups", "count"),
    "profile": ("groups", "profile"),
    "kv_tokens": ("groups", "kv_tokens"),
    "rate_per_s": ("workload", "rate_per_s"),
    "speed": ("workload", "speed"),
    "block_size": ("block_size",),
    "closed_loop": ("closed_loop",),
    "faults": ("faults",),
}
_SECTIONS = (
    ("world", World),
    ("fleet", WorkerGroup),
    ("goodput", Goodput),
    ("router", RouterSettings),
)
_OF_A_WORKLOAD = ("source", "format", "requests", "seconds", "spread_s")


def axis_paths() -> dict[str, Path]:
    """Every axis but `policies` and `seeds`, with the place in a set-up that it sets."""
    paths = dict(SHORT_NAMES)
    for section, kind in _SECTIONS:
        for field in msgspec.structs.fields(kind):
            place = "groups" if section == "fleet" else section
            paths[f"{section}.{field.name}"] = (place, field.name)
    paths.update({f"workload.{name}": ("workload", name) for name in _OF_A_WORKLOAD})
    return paths


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one axis: a list, or a range to draw from. Lifetime: one sweep."""

    listed: tuple[Scalar, ...] = ()
    kind: str = ""  # of a range; "": a list
    low: float = 0.0
    high: float = 0.0

    @property
    def varies(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self.kind) or len(self.listed) > 1

    def draw(self, random: Random) -> Scalar:
        """One value, each as likely as any other; of a logarithmic range, each ratio."""
        if not self.kind:
            return self.listed[_below(random, len(self.listed))]
        if self.kind == "int":
            return int(self.low) + _below(random, int(self.high) - int(self.low) + 1)
        return _between(self.kind, self.low, self.high, random.random())


def parse_values(where: str, given: Any, *, grid: bool) -> Values:
    """The values that a sweep file gives for an axis: one, a list, or a range as a mapping.

    A range is `{linear: [low, high]}`, `{log: [low, high]}` or `{int: [low, high]}`, ends included;
    in a grid the first two need `steps`. Raises `SweepError` for anything else.
    """
    if isinstance(given, dict):
        return _parse_range(where, given, grid=grid)
    listed = given if isinstance(given, list) else [given]
    bad = [item for item in listed if not isinstance(item, Scalar)]
    if bad or not listed:
        what = f"{bad[0]!r} is no value" if bad else "the list is empty"
        raise SweepError([f"{where}: {what}; give a value, a list of values, or {_ranges(grid)}"])
    if len({(type(item), item) for item in listed}) < len(listed):
        raise SweepError([f"{where}: a value is given twice"])
    return Values(tuple(listed))


def _parse_range(where: str, given: dict[Any, Any], *, grid: bool) -> Values:
    kinds = [key for key in given if key in KINDS]
    for key in given:
        if key not in KINDS and key != "steps":
            raise SweepError([unknown(where, key, (*KINDS, "steps"))])
    if len(kinds) != 1:
        raise SweepError([f"{where}: give one of {', '.join(KINDS)}, as in {_ranges(grid)}"])
    kind, ends = kinds[0], given[kinds[0]]
    kinds_of_numbers: Any = int if kind == "int" else int | float
    if (
        not isinstance(ends, list)
        or len(ends) != 2
        or any(isinstance(n, bool) or not isinstance(n, kinds_of_numbers) for n in ends)
        or not -math.inf < ends[0] < ends[1] < math.inf
        or (kind == "log" and ends[0] <= 0)
    ):
        above = " above 0" if kind == "log" else ""
        whole = "whole numbers" if kind == "int" else "numbers"
        raise SweepError(
            [f"{where}.{kind}: {ends!r} is not [low, high] of two {whole}{above}, low < high"]
        )
    if not grid:
        if "steps" in given:
            raise SweepError([f"{where}: steps is for a grid; a random search draws between"])
        return Values(kind=kind, low=ends[0], high=ends[1])
    return Values(_steps(where, kind, ends[0], ends[1], given.get("steps")))


def _steps(where: str, kind: str, low: float, high: float, steps: Any) -> tuple[Scalar, ...]:
    if kind == "int" and steps is None:
        steps = int(high - low) + 1
    if isinstance(steps, bool) or not isinstance(steps, int) or not 2 <= steps <= MAX_VALUES:
        raise SweepError([f"{where}: steps is {steps!r}; give how many values, 2 to {MAX_VALUES}"])
    shares = [step / (steps - 1) for step in range(steps)]
    if kind == "int":
        return tuple(dict.fromkeys(round(low + (high - low) * share) for share in shares))
    return tuple(dict.fromkeys(_between(kind, low, high, share) for share in shares))


def _between(kind: str, low: float, high: float, share: float) -> float:
    value = low * (high / low) ** share if kind == "log" else low + (high - low) * share
    return float(f"{value:.{DIGITS}g}")


def _below(random: Random, count: int) -> int:
    # Not `randrange`, which draws a varying number of bits: each draw takes one number here.
    return min(int(random.random() * count), count - 1)


def _ranges(grid: bool) -> str:
    return "{log: [0.1, 10], steps: 5}" if grid else "{log: [0.1, 10]}"
