"""Points, which are runs that differ only by seed, with intervals; and Pareto fronts of points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.profiles import gpus_of
from simulator.replay.setup import Setup
from simulator.report.figures import (
    FIGURES,
    Figure,
    Interval,
    Ratio,
    interval,
    percent,
    ratio_of_pairs,
    whole,
)
from simulator.report.row import ReplayRow
from simulator.runs.sheet import SHORT_NAMES
from simulator.runs.task import RunOutcome


def fleet_gpus(setup: Setup) -> int:
    """Return the number of GPUs of all workers of a set-up."""
    return sum(group.count * gpus_of(group.profile) for group in setup.groups)


def per_one(value: float | None) -> str:
    """Format tokens per second of one GPU or user; few tokens get a decimal."""
    return whole(value) if value is None or value >= 100 else f"{value:.1f}"


PER_GPU = Figure(
    "tokens_per_s_gpu", "tokens/s/GPU", "higher", per_one, "output of all workers over their GPUs",
    "tokens/s",
)  # fmt: skip
PER_USER = Figure(
    "tokens_per_s_user", "tokens/s/user", "higher", per_one,
    "1000 / mean TPOT in ms: how fast one answer grows", "tokens/s",
)  # fmt: skip
LOST = Figure(
    "lost_share", "lost", "lower", percent, "requests turned away or lost, of all requests"
)
OURS = (*FIGURES, PER_GPU, PER_USER, LOST)
# A policy that rejects requests is fast with the others, so it is not compared.
MAX_LOST_SHARE = 0.01
SCENERY = ("world.", "goodput.", "workload.", "router.")
LOADS = ("rate_per_s", "speed")


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one policy and one fleet at one load in one scene, over all seeds. Lifetime:
    report.
    """

    setup: Setup  # of its first seed
    varied: Mapping[str, Any]  # the settings that differ from other points, without the policy
    rows: tuple[ReplayRow, ...]
    figures: Mapping[str, Interval | None]  # by the names of `OURS`

    @property
    def name(self) -> str:
        """The name of the policy and all other settings that vary, in one line."""
        return _setup_text(self.setup.policy, self.varied)

    @property
    def choice(self) -> str:
        """The policy and the fleet as text: the settings that a reader can choose."""
        return _setup_text(self.setup.policy, self.fleet)

    @property
    def fleet(self) -> dict[str, Any]:
        """The settings of the workers that vary between points."""
        return {k: v for k, v in self.varied.items() if not is_load(k) and not is_scenery(k)}

    @property
    def scene(self) -> str:
        """The settings that nobody can choose and that vary between points, such as the workload;
        "" if there are none.
        """
        return _setup_text("", {k: v for k, v in self.varied.items() if is_scenery(k)})

    @property
    def load(self) -> str:
        """The rate or speed of the workload if it varies between points, else ""."""
        return _setup_text("", {k: v for k, v in self.varied.items() if is_load(k)})

    def mean(self, figure: str) -> float | None:
        """Return the figure's mean over seeds, or None if it was not measured."""
        found = self.figures[figure]
        return None if found is None else found.mean

    @property
    def serves(self) -> bool:
        """True if at most `MAX_LOST_SHARE` of the requests were turned away or lost."""
        lost = self.mean(LOST.name)
        return lost is not None and lost <= MAX_LOST_SHARE


def points_of(outcomes: Iterable[RunOutcome]) -> list[Point]:
    """Return one point for all seeds of a set-up, in the order of first runs.

    Failed runs are left out.
    """
    groups: dict[Setup, list[RunOutcome]] = {}
    for outcome in outcomes:
        if outcome.row is not None:
            groups.setdefault(msgspec.structs.replace(outcome.task.setup, seed=0), []).append(
                outcome
            )
    varied = varied_of(list(groups))
    points = []
    for setup, own in groups.items():
        rows = tuple(outcome.row for outcome in own if outcome.row is not None)
        taken = [measured(setup, row) for row in rows]
        figures = {
            figure.name: interval(
                [v for v in (each[figure.name] for each in taken) if v is not None]
            )
            for figure in OURS
        }
        flat = flat_setup(setup)
        points.append(Point(own[0].task.setup, {k: flat.get(k) for k in varied}, rows, figures))
    return points


def measured(setup: Setup, row: ReplayRow) -> dict[str, float | None]:
    """Return every figure of one run by its name."""
    found = {figure.name: figure.of(row) for figure in FIGURES}
    total, tpot_ms = row.output_tokens_per_s, row.tpot_ms.mean
    found[PER_GPU.name] = None if total is None else round(total / fleet_gpus(setup), 3)
    found[PER_USER.name] = round(1000 / tpot_ms, 3) if tpot_ms else None
    lost = row.rejected + row.failed
    found[LOST.name] = round(lost / row.requests, 6) if row.requests else None
    return found


def beside(one: Figure, point: Point, other: Point) -> Ratio | Interval | None:
    """Compare two points by a figure, paired by seed. Returns a difference for shares, else a
    ratio; None if the points have no seed in common.
    """
    there = {row.seed: measured(other.setup, row)[one.name] for row in other.rows}
    pairs = [
        (own, theirs)
        for row in sorted(point.rows, key=lambda row: row.seed)
        if (own := measured(point.setup, row)[one.name]) is not None
        and (theirs := there.get(row.seed)) is not None
    ]
    if one.show is percent:
        return interval([own - theirs for own, theirs in pairs])
    return ratio_of_pairs(pairs)


def varied_of(setups: Sequence[Setup]) -> list[str]:
    """Return the names of the settings that differ between the set-ups, except policy and seed."""
    flats = [flat_setup(setup) for setup in setups]
    names = dict.fromkeys(name for flat in flats for name in flat)
    return [name for name in names if len({msgspec.json.encode(f.get(name)) for f in flats}) > 1]


def flat_setup(setup: Setup) -> dict[str, Any]:
    """Return the set-up as a mapping from axis name to value, without policy and seed."""
    plain = msgspec.to_builtins(setup)
    groups = plain.pop("groups")
    del plain["policy"], plain["seed"]
    if len(groups) == 1:
        plain["fleet"] = groups[0]
    else:
        plain["groups"] = groups
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    short = {
        ".".join("fleet" if part == "groups" else part for part in path): name
        for name, path in SHORT_NAMES.items()
    }
    return {short.get(name, name): value for name, value in flat.items()}


def is_load(name: str) -> bool:
    """Return True if an axis sets how much load the fleet gets."""
    return name in LOADS


def is_scenery(name: str) -> bool:
    """Return True if an axis sets the scene, such as the workload; points are compared only within
    a scene.
    """
    return name in ("closed_loop", "faults") or name.startswith(SCENERY)


def best(points: Sequence[Point], figure: Figure) -> list[Point]:
    """Return the points that have the figure, best first.

    Points that turn requests away are left out unless all do.
    """
    able = [point for point in points if point.serves] or list(points)
    known = [(point, point.mean(figure.name)) for point in able]
    ranked = [(value, point) for point, value in known if value is not None]
    sign = 1 if figure.better == "lower" else -1
    return [point for _, point in sorted(ranked, key=lambda pair: sign * pair[0])]


def _setup_text(first: str, varied: Mapping[str, Any]) -> str:
    parts = [first, *(f"{name}={_plain(value)}" for name, value in varied.items())]
    return " ".join(filter(None, parts))


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def front(points: Sequence[Point], first: Figure, second: Figure) -> list[Point]:
    """Return the points not dominated in both figures, best in `first` first.

    A point is dominated by one that is as good in both and better in one. Points that turn requests
    away are left out unless all do, as are points without one of the figures. Of equal points, only
    the earliest is returned.
    """
    able = [point for point in points if point.serves] or list(points)
    signed = [
        (_signed(first, point), _signed(second, point), order)
        for order, point in enumerate(able)
        if point.mean(first.name) is not None and point.mean(second.name) is not None
    ]
    kept: list[Point] = []
    best_second = float("inf")
    for _, other, order in sorted(signed):
        if other < best_second:
            best_second = other
            kept.append(able[order])
    return kept


def _signed(figure: Figure, point: Point) -> float:
    """Return the figure of a point, with its sign changed if more is better, so that less is always
    better.
    """
    value = point.mean(figure.name)
    assert value is not None
    return value if figure.better == "lower" else -value
