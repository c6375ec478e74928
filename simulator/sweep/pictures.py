"""The pictures of a sweep, as SVG text: two figures against each other, and one against load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from policies.load import name_of
from simulator.plots import INK, RC, RULE, as_svg, log_labels, log_steps, new_figure
from simulator.report.aggregate import Interval
from simulator.report.figures import Figure
from simulator.report.pictures import styles
from simulator.sweep.points import Point

SWEEP_WIDTH_IN = 4.6
SWEEP_LINE_IN = 0.2  # of a legend
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
FAINT = 0.35


def front_plot(
    points: Sequence[Point],
    front: Sequence[Point],
    numbered: Mapping[int, Point],
    first: Figure,
    second: Figure,
) -> str:
    """`second` against `first` (along the bottom) of all points; those of the front are joined."""
    names = list(dict.fromkeys(policy_name(point) for point in points))
    lines = math.ceil(len(names) / 2)
    height = 3.0 + SWEEP_LINE_IN * lines
    with mpl.rc_context(RC):
        figure, axes = new_figure(SWEEP_WIDTH_IN, height)
        _joined(axes, front, first, second)
        drawn = styles(names)
        for number, name in enumerate(names):
            own = [point for point in points if policy_name(point) == name]
            mark, colour = MARKERS[number % len(MARKERS)], drawn[name][0]
            axes.scatter([], [], s=22, marker=mark, color=colour, linewidths=0, label=name)
            for group, alpha in ((True, 1.0), (False, FAINT)):
                some = [point for point in own if point.serves is group]
                axes.scatter(
                    _values(some, first), _values(some, second), s=22, marker=mark, color=colour,
                    alpha=alpha, linewidths=0, zorder=3,
                )  # fmt: skip
        for label, point in numbered.items():
            axes.annotate(
                str(label), (_value(point, first), _value(point, second)), (4, 4),
                textcoords="offset points", fontsize=8, fontweight="bold", color=INK, zorder=4,
            )  # fmt: skip
        for which, one in ((axes.xaxis, first), (axes.yaxis, second)):
            which.set_label_text(f"{one.title}{', s' if one.unit == 'ms' else ''}")
        if second.unit == "ms":
            _log_scale(axes, [y for y in _values(points, second) if y > 0])
        if first.show(0.5).endswith("%"):
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        _legend_above(figure, height, lines)
        return as_svg(figure)


def load_plot(
    curves: Mapping[str, Sequence[tuple[float, Interval]]], xlabel: str, figure_of: Figure
) -> str:
    """A figure in ms against load: a line a policy, the seeds' 95 % interval around it."""
    lines = math.ceil(len(curves) / 2)
    height = 2.7 + SWEEP_LINE_IN * lines
    drawn = styles(list(curves))
    with mpl.rc_context(RC):
        figure, axes = new_figure(SWEEP_WIDTH_IN, height)
        values: list[float] = []
        for name, curve in curves.items():
            colour, dash = drawn[name]
            xs = [load for load, _ in curve]
            means = [found.mean / 1000 for _, found in curve]
            values += [mean for mean in means if mean > 0]
            axes.plot(xs, means, color=colour, linestyle=dash, lw=1.6, marker="o", ms=3, label=name)
            low = [_end(found.low, found.mean) / 1000 for _, found in curve]
            high = [_end(found.high, found.mean) / 1000 for _, found in curve]
            # An interval may reach below 0, which a logarithmic axis has not.
            least = [max(a, mean / 100) for a, mean in zip(low, means, strict=True)]
            axes.fill_between(xs, least, high, color=colour, alpha=0.18, linewidth=0)
        _log_scale(axes, values)
        axes.set(xlabel=xlabel, ylabel=f"{figure_of.title}, s")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        _legend_above(figure, height, lines)
        return as_svg(figure)


def policy_name(point: Point) -> str:
    """The policy and its wrappers without parameters: what colours and marks tell apart."""
    return name_of(point.setup.policy)


def _joined(axes: Axes, front: Sequence[Point], first: Figure, second: Figure) -> None:
    ordered = sorted((_value(p, first), _value(p, second)) for p in front)
    axes.plot(
        [x for x, _ in ordered], [y for _, y in ordered], color=INK, lw=0.9, alpha=0.6, zorder=2
    )


def _values(points: Sequence[Point], one: Figure) -> list[float]:
    return [_value(point, one) for point in points]


def _value(point: Point, one: Figure) -> float:
    mean = point.mean(one.name)
    if mean is None:
        return float("nan")
    return mean / 1000 if one.unit == "ms" else mean


def _log_scale(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    if len(values):
        steps = log_steps(float(np.nanmin(values)), float(np.nanmax(values)))
        axes.set_ylim(steps[0], steps[-1])
        axes.set_yticks(log_labels(steps))
    show: Callable[[float, float], str] = lambda value, _: f"{value:g}"  # noqa: E731
    axes.yaxis.set_major_formatter(show)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend_above(figure: mpl.figure.Figure, height: float, lines: int) -> None:
    figure.subplots_adjust(
        top=1 - (0.15 + SWEEP_LINE_IN * lines) / height,
        left=0.72 / SWEEP_WIDTH_IN,  # the scale's labels may have five digits
        right=1 - 0.25 / SWEEP_WIDTH_IN,
    )
    figure.legend(frameon=False, loc="upper center", ncols=2, handlelength=2.6)


def _end(value: float | None, mean: float) -> float:
    return mean if value is None else value
