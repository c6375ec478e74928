"""The sweep file: a base, and what is varied around it; read, checked, turned into set-ups.

workload: {source: tuesday.jsonl.zst}
fleet: {profile: qwen3-32b-h100-tp2, count: 8}
grid:                                   # or `random:` with `samples` and `seed`
  policies: [round_robin, {hybrid: {load_factor: [0.5, 1, 2]}}]
  workers: [4, 8, 16]
  seeds: [1, 2, 3]
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from simulator.replay.setup import Goodput, RouterSettings, Setup, WorkerGroup, WorkloadSpec, World
from simulator.sweep.axes import Scalar, Values, axis_paths, parse_values
from simulator.sweep.check import check_setups
from simulator.sweep.errors import SweepError, unknown
from simulator.sweep.policy_axis import PolicyAxis, check_policies, parse_policies
from simulator.yaml_file import YamlFileError, read_yaml

MAX_RUNS = 100_000
SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "workload": WorkloadSpec,
    "fleet": WorkerGroup,
    "world": World,
    "goodput": Goodput,
    "router": RouterSettings,
}
PLAIN = ("block_size", "closed_loop", "faults", "native")
SEARCHES = ("grid", "random")
NO_SEEDS = (0,)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A sweep as it was asked for. Lifetime: one sweep."""

    base: Mapping[str, Any]  # the plain form of a set-up, without policy and seed
    policies: tuple[PolicyAxis, ...]
    axes: Mapping[str, Values]
    seeds: tuple[int, ...]
    samples: int | None = None  # None: the whole grid
    seed: int = 0  # of what is drawn


def read_sheet(path: Path) -> list[Setup]:
    """The set-ups that a sweep file asks for, each once, checked.

    Raises `SweepError` naming what is wrong by its path in the file, and what would be right.
    """
    try:
        return setups_of(parse_sheet(read_yaml(path)))
    except (SweepError, YamlFileError) as error:
        lines = (
            line if line.startswith(str(path)) else f"{path}: {line}" for line in error.problems
        )
        raise SweepError(list(lines)) from error


def parse_sheet(given: Any) -> Sheet:
    """A sweep from plain data. Raises `SweepError`."""
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
    """The set-ups of a sheet, each once, seeds innermost. Raises `SweepError` for bad ones."""
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
    """A set-up from its plain form. Raises `SweepError` with the file's words for the place."""
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
    """Policies by turns, so that each gets its share; what leaves nothing to choose comes once."""
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
