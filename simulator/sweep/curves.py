"""One figure against load, per policy: which lines go into which picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.report.aggregate import Interval
from simulator.report.figures import Figure
from simulator.sweep.points import Point

# What stands along the bottom: the first of these that a sweep varies.
AXES = {
    "rate_per_s": "requests per second",
    "speed": "times as fast as recorded",
    "workers": "workers",
}
MAX_LINES = 8  # that can be told apart in one picture

Curve = Sequence[tuple[float, Interval]]


@dataclass(frozen=True, slots=True)
class LoadPicture:
    """The lines of one picture. Lifetime: report."""

    title: str  # the fleet, where several are tried
    xlabel: str
    curves: dict[str, Curve]
    left_out: int  # lines beyond those that can be told apart: the worst ones


def load_pictures(points: Sequence[Point], figure: Figure) -> list[LoadPicture]:
    """A picture for each fleet of the points of one world; none where no load is varied."""
    axis = next((name for name in AXES if any(name in p.varied for p in points)), None)
    if axis is None:
        return []
    groups: dict[str, dict[str, list[tuple[float, Interval]]]] = {}
    for point in points:
        found, load = point.figures[figure.name], point.varied.get(axis)
        if found is None or load is None:
            continue
        curves = groups.setdefault(_fleet(point, axis), {})
        curves.setdefault(point.setup.policy, []).append((float(load), found))
    return [_picture(title, AXES[axis], curves) for title, curves in groups.items()]


def _picture(
    title: str, xlabel: str, curves: dict[str, list[tuple[float, Interval]]]
) -> LoadPicture:
    ranked = sorted(curves, key=lambda name: _level(curves[name]))
    kept = [name for name in curves if name in ranked[:MAX_LINES]]
    lines: dict[str, Curve] = {
        name: sorted(curves[name], key=lambda pair: pair[0]) for name in kept
    }
    return LoadPicture(title, xlabel, lines, len(curves) - len(kept))


def _level(curve: Curve) -> float:
    """Mean logarithm over loads: no single load decides which lines are shown."""
    return sum(math.log(max(found.mean, 1e-3)) for _, found in curve) / len(curve)


def _fleet(point: Point, axis: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.fleet.items() if name != axis)
