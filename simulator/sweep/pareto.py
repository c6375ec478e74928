"""The Pareto front of two figures: points that no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.report.figures import Figure
from simulator.sweep.points import Point


def front(points: Sequence[Point], first: Figure, second: Figure) -> list[Point]:
    """The points not dominated in both figures, best in `first` first.

    A point is dominated by one that is as good in both and better in one. Points that turn
    requests away are left out unless all do, as are points without one of the figures. Of equal
    points the earlier one stands for all.
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
    """The figure, turned so that less is better."""
    value = point.mean(figure.name)
    assert value is not None
    return value if figure.better == "lower" else -value
