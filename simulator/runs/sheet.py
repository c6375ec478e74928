"""Reads the file of a sweep, which has a base set-up and the axes varied around it; checks it, and
makes set-ups of it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path as sheet_Path
from random import Random
from typing import Any
from urllib.parse import quote

import msgspec

from engine.profiles import profile
from policies.load import PolicyError, load, text_of
from simulator.replay.fleet import check_setup
from simulator.replay.setup import Goodput, RouterSettings, Setup, WorkerGroup, World
from simulator.runs.task import SweepError, unknown
from simulator.traces.spec import WorkloadSpec
from simulator.traces.timing import check_timing
from simulator.yaml_file import YamlFileError, read_yaml

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
    """Return every axis except `policies` and `seeds`, with the place in a set-up whose value it
    sets.
    """
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
        """True if the axis has more than one value."""
        return bool(self.kind) or len(self.listed) > 1

    def draw(self, random: Random) -> Scalar:
        """Draw one value at random: of a list or a linear range, each value is equally likely; of a
        logarithmic range, each ratio is.
        """
        if not self.kind:
            return self.listed[_below(random, len(self.listed))]
        if self.kind == "int":
            return int(self.low) + _below(random, int(self.high) - int(self.low) + 1)
        return _between(self.kind, self.low, self.high, random.random())


def parse_values(where: str, given: Any, *, grid: bool) -> Values:
    """Return the values that a sweep file gives for an axis: one, a list, or a range as a mapping.

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


SHAPE = (
    "a policy is a name, a specification as hybrid?load_factor=2, or a name with values for its "
    "parameters as {hybrid: {load_factor: [1, 2]}}; wrappers follow behind |, and a wrapper's "
    "parameter is written as {hybrid|bounded_load: {bounded_load.epsilon: [0.1, 1]}}"
)


@dataclass(frozen=True, slots=True)
class PolicyAxis:
    """One policy and the values that its parameters may have. Lifetime: one sweep."""

    spec: str  # the name, and parameters that are not varied where it was given as one text
    params: Mapping[str, Values]

    @property
    def varies(self) -> bool:
        """True if any parameter has more than one value."""
        return any(values.varies for values in self.params.values())

    def specs(self) -> Iterator[str]:
        """Yield the specification of every combination of the listed values."""
        for chosen in product(*(values.listed for values in self.params.values())):
            yield self._spec(dict(zip(self.params, chosen, strict=True)))

    def draw(self, random: Random) -> str:
        """Draw a value for each parameter at random, and return the specification."""
        return self._spec({name: values.draw(random) for name, values in self.params.items()})

    def _spec(self, chosen: Mapping[str, Scalar]) -> str:
        inner, *wrappers = self.spec.split("|")
        pairs: dict[str, list[str]] = {part: [] for part in ("", *wrappers)}
        for key, value in chosen.items():  # "epsilon", or "bounded_load.epsilon" of a wrapper
            wrapper, _, name = key.rpartition(".")
            pairs[wrapper].append(f"{name}={quote(text_of(value), safe='')}")
        parts = ((wrapper or inner, "&".join(of)) for wrapper, of in pairs.items())
        return "|".join(part + ("?" + told if told else "") for part, told in parts)


def parse_policies(where: str, given: Any, *, grid: bool) -> list[PolicyAxis]:
    """Return the policies that a sweep file lists. Raises `SweepError` with everything that is
    wrong in the list.
    """
    if not isinstance(given, list) or not given:
        raise SweepError([f"{where}: give a list of policies; {SHAPE}"])
    found: list[PolicyAxis] = []
    problems: list[str] = []
    for number, item in enumerate(given):
        try:
            found.append(_parse(f"{where}[{number}]", item, grid=grid))
        except SweepError as error:
            problems += error.problems
    if problems:
        raise SweepError(problems)
    return found


def check_policies(specs: list[str]) -> None:
    """Load each specification once. Raises `SweepError` with the reasons of invalid ones."""
    problems: list[str] = []
    for spec in dict.fromkeys(specs):
        try:
            load(spec)
        except PolicyError as error:
            problems.append(str(error))
    if problems:
        raise SweepError(list(dict.fromkeys(problems)))


def _parse(where: str, item: Any, *, grid: bool) -> PolicyAxis:
    if isinstance(item, str):
        return PolicyAxis(item, {})
    if not isinstance(item, dict) or len(item) != 1:
        raise SweepError([f"{where}: {item!r} is no policy; {SHAPE}"])
    name, params = next(iter(item.items()))
    if "?" in name or not isinstance(params or {}, dict):
        raise SweepError([f"{where}: {item!r} is no policy; {SHAPE}"])
    check_policies([name])  # before its parameters, so that the error is about a wrong name
    wrappers = name.split("|")[1:]
    for key in params or {}:
        wrapper, dot, _ = str(key).rpartition(".")
        if dot and wrapper not in wrappers:
            known = ", ".join(wrappers) or "none"
            raise SweepError(
                [f"{where}.{name}.{key}: {wrapper} is no wrapper of {name}; wrappers: {known}"]
            )
    values = {
        key: parse_values(f"{where}.{name}.{key}", value, grid=grid)
        for key, value in (params or {}).items()
    }
    return PolicyAxis(name, values)


MAX_SHOWN = 20
# Of a group of workers: counts and thresholds that only a number above 0 makes sense for.
ABOVE_0 = (
    "max_num_tokens", "max_batch_size", "max_model_tokens",
    "max_requests", "max_queued_tokens", "max_kv_fraction",
)  # fmt: skip


def check_setups(setups: Sequence[Setup]) -> None:
    """Raise `SweepError` with everything that no replay could do, each problem once.
    `check_policies` checks the policies; a workload is read when it is run.
    """
    # Settings that are common to all seeds and policies are checked once.
    different = {msgspec.structs.replace(setup, policy="", seed=0): None for setup in setups}
    problems = dict.fromkeys(line for setup in different for line in _problems(setup))
    if problems:
        told = list(problems)[:MAX_SHOWN]
        more = len(problems) - len(told)
        raise SweepError([*told, f"and {more} more"] if more else told)


def _problems(setup: Setup) -> Iterator[str]:
    for line in _refusal(lambda: check_timing(setup.workload)):
        yield f"workload: {line}"
    for line in _refusal(lambda: check_setup(setup)):
        yield re.sub(r"^groups(\[\d+\])?", "fleet", line)
    for name in ("ttft_ms", "tpot_ms"):
        yield from _above_0(f"goodput.{name}", getattr(setup.goodput, name))
    for group in setup.groups:
        yield from _group_problems(group, setup.block_size or 1)


def _group_problems(group: WorkerGroup, block_size: int) -> Iterator[str]:
    for line in _refusal(lambda: profile(group.profile)):
        yield f"fleet.profile: {line}"
    if group.kv_tokens is not None and group.kv_tokens < block_size:
        yield (
            f"fleet.kv_tokens: {group.kv_tokens} holds no block of {block_size} tokens; "
            "give more, or smaller blocks (block_size)"
        )
    for name in ABOVE_0:
        yield from _above_0(f"fleet.{name}", getattr(group, name))


def _refusal(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ValueError as error:  # TraceError and ReplayError are
        yield str(error)


def _above_0(name: str, value: float | None) -> Iterator[str]:
    if value is not None and not 0 < value < math.inf:
        yield f"{name}: {value:g}; expected a finite number above 0"


MAX_RUNS = 100_000
SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "workload": WorkloadSpec,
    "fleet": WorkerGroup,
    "world": World,
    "goodput": Goodput,
    "router": RouterSettings,
}
PLAIN = ("block_size", "closed_loop", "faults")
SEARCHES = ("grid", "random")
NO_SEEDS = (0,)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A sweep as its file describes it. Lifetime: one sweep."""

    base: Mapping[str, Any]  # the plain form of a set-up, without policy and seed
    policies: tuple[PolicyAxis, ...]
    axes: Mapping[str, Values]
    seeds: tuple[int, ...]
    samples: int | None = None  # None: the whole grid
    seed: int = 0  # seed of the draws


def read_sheet(path: sheet_Path) -> list[Setup]:
    """Return the set-ups that a sweep file asks for, each once, after checking them. Raises
    `SweepError`, which names the place in the file of what is wrong, and what would be right.
    """
    try:
        return setups_of(parse_sheet(read_yaml(path)))
    except (SweepError, YamlFileError) as error:
        lines = (
            line if line.startswith(str(path)) else f"{path}: {line}" for line in error.problems
        )
        raise SweepError(list(lines)) from error


def parse_sheet(given: Any) -> Sheet:
    """Return the sweep that the plain data of a file describe. Raises `SweepError` for invalid
    data.
    """
    if not isinstance(given, dict):
        raise SweepError(["the file must be a mapping with workload, fleet and grid or random"])
    problems = _unknown_keys(given)
    problems += [f"{name}: is missing" for name in ("workload", "fleet") if name not in given]
    searches = [name for name in SEARCHES if name in given]
    if len(searches) != 1:
        problems.append("give one of grid and random: what is to be varied")
    if problems:
        raise SweepError(problems)
    base = {name: given[name] for name in (*PLAIN, *SECTIONS) if name in given}
    base.pop("fleet")
    fleet = given["fleet"]
    base["groups"] = fleet if isinstance(fleet, list) else [{"count": 1, **fleet}]
    search, name = given[searches[0]], searches[0]
    if not isinstance(search, dict):
        raise SweepError([f"{name}: must be a mapping of what is varied, with policies"])
    return _parse_search(name, search, base)


def setups_of(sheet: Sheet) -> list[Setup]:
    """Return the set-ups of a sheet, each once, with seeds varying fastest.

    Raises `SweepError` for invalid set-ups.
    """
    chosen = _grid(sheet) if sheet.samples is None else _drawn(sheet)
    check_policies([spec for spec, _ in chosen])
    paths = axis_paths()
    found: dict[Setup, None] = {}
    for spec, values in chosen:
        plain = copy.deepcopy(dict(sheet.base))
        for name, value in values.items():
            _put(plain, paths[name], value)
        one = convert({**plain, "policy": spec, "seed": 0})
        found.update(dict.fromkeys(msgspec.structs.replace(one, seed=s) for s in sheet.seeds))
    setups = list(found)
    check_setups(setups)
    return setups


def convert(plain: Any) -> Setup:
    """Return the set-up that plain data describe. Raises `SweepError` with the place of an error in
    the names of the sweep file.
    """
    try:
        return msgspec.convert(plain, Setup)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        place = re.sub(r"^groups\[\.\.\.\]|^groups\[\d+\]|^groups", "fleet", place.rstrip("`"))
        raise SweepError([f"{place}: {what}" if place else what]) from error


def _unknown_keys(given: dict[Any, Any]) -> list[str]:
    valid = (*SECTIONS, *PLAIN, *SEARCHES)
    problems = [unknown("the file", key, valid) for key in given if key not in valid]
    for name, kind in SECTIONS.items():
        section = given.get(name, {})
        parts = section if name == "fleet" and isinstance(section, list) else [section]
        fields = [field.name for field in msgspec.structs.fields(kind)]
        if not parts:
            problems.append(f"{name}: the list is empty")
        for part in parts:
            if not isinstance(part, dict):
                problems.append(f"{name}: {part!r} is not a mapping of {', '.join(fields)}")
                continue
            problems += [unknown(name, key, fields) for key in part if key not in fields]
    return problems


def _parse_search(name: str, search: dict[Any, Any], base: dict[str, Any]) -> Sheet:
    grid = name == "grid"
    paths = axis_paths()
    own = ("policies", "seeds") if grid else ("policies", "seeds", "samples", "seed")
    problems = [unknown(name, key, (*own, *paths)) for key in search if key not in (*own, *paths)]
    axes: dict[str, Values] = {}
    policies: list[PolicyAxis] = []
    try:
        policies = parse_policies(f"{name}.policies", search.get("policies"), grid=grid)
    except SweepError as error:
        problems += error.problems
    for key, given in search.items():
        if key in own or key not in paths:
            continue
        if paths[key][0] == "groups" and len(base["groups"]) > 1:
            problems.append(f"{name}.{key}: varies a fleet of one group; this one has several")
        try:
            axes[key] = parse_values(f"{name}.{key}", given, grid=grid)
        except SweepError as error:
            problems += error.problems
    places = [paths[key] for key in axes]
    problems += [
        f"{name}.{key}: sets what another axis sets" for key in axes if places.count(paths[key]) > 1
    ]
    seeds = search.get("seeds", list(NO_SEEDS))
    if not _whole(seeds) or len(set(seeds)) < len(seeds):
        problems.append(f"{name}.seeds: {seeds!r} is not a list of different whole numbers >= 0")
    samples, seed = search.get("samples"), search.get("seed", 0)
    if not grid and not (_whole([samples]) and 1 <= search["samples"] <= MAX_RUNS):
        problems.append(f"{name}.samples: {samples!r} is not a whole number from 1 to {MAX_RUNS}")
    if not _whole([seed]):
        problems.append(f"{name}.seed: {seed!r} is not a whole number >= 0")
    if problems:
        raise SweepError(problems)
    return Sheet(base, tuple(policies), axes, tuple(seeds), samples, seed)


def _grid(sheet: Sheet) -> list[tuple[str, dict[str, Scalar]]]:
    specs = sum(prod(len(v.listed) for v in axis.params.values()) for axis in sheet.policies)
    runs = specs * prod(len(v.listed) for v in sheet.axes.values()) * len(sheet.seeds)
    if runs > MAX_RUNS:
        raise SweepError(
            [f"grid: {runs:,} runs, the limit is {MAX_RUNS:,}; vary less, or draw (random)"]
        )
    names = [spec for axis in sheet.policies for spec in axis.specs()]
    combinations = list(product(*(values.listed for values in sheet.axes.values())))
    return [
        (spec, dict(zip(sheet.axes, combination, strict=True)))
        for combination in combinations
        for spec in names
    ]


def _drawn(sheet: Sheet) -> list[tuple[str, dict[str, Scalar]]]:
    """Draw policies and axis values for a random sweep.

    Policies take turns, so that each gets its share; a policy that leaves nothing to draw comes
    once.
    """
    assert sheet.samples is not None
    if sheet.samples * len(sheet.seeds) > MAX_RUNS:
        raise SweepError([f"random: samples x seeds is more than {MAX_RUNS:,}"])
    random = Random(f"sweep {sheet.seed}")
    varying = any(values.varies for values in sheet.axes.values())
    turns = [axis for axis in sheet.policies if varying or axis.varies] or list(sheet.policies)
    once = [axis for axis in sheet.policies if axis not in turns]
    order = [*once, *(turns[n % len(turns)] for n in range(sheet.samples))]
    drawn = []
    for axis in islice(order, sheet.samples):
        values = {name: values.draw(random) for name, values in sheet.axes.items()}
        drawn.append((axis.draw(random), values))
    return drawn


def _put(plain: dict[str, Any], path: tuple[str, ...], value: Scalar) -> None:
    if len(path) == 1:
        plain[path[0]] = value
    elif path[0] == "groups":
        plain["groups"][0][path[1]] = value
    else:
        plain.setdefault(path[0], {})[path[1]] = value


def _whole(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    )
