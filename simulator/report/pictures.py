"""The pictures of replays, as SVG text, with the helpers and colours of `simulator.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from simulator.plots import (
    BUSY_MAP,
    INK,
    MAX_LABELS,
    POLICY_STYLES,
    RC,
    RULE,
    WORKER_COLOURS,
    as_svg,
    log_labels,
    log_steps,
    new_figure,
)
from simulator.replay.result import NEVER, HotPrefix, Samples
from simulator.report.view import Floats, RunView, hit_rates, on_grid

WIDTH_IN, WIDE_IN = 3.1, 4.6
GRID_COLUMNS = 240  # stretches of time in a map of workers
WINDOWS = 40  # stretches of time of a hit rate
SMOOTH_PX = 600  # browsers blur a picture of fewer pixels when they widen it
MOST_PREFIXES = 5
LABEL_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
# Of the palette, those dark enough for a line on white.
LINE_COLOURS = tuple(colour for colour in WORKER_COLOURS if colour != "#F0E442")
TIME_COLOURS = ("#CC79A7", "#E69F00", "#0072B2")
TOKEN_COLOURS = ("#009E73", "#E69F00", "#D55E00")

Style = tuple[str, Any]  # colour, dash


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Colour and dash of each policy: its own where it has one, else the next that is free."""
    known = [name for name in labels if name in POLICY_STYLES]
    chosen: dict[str, Style] = {name: POLICY_STYLES[name] for name in known}
    taken = [colour for colour, _ in chosen.values()]
    free = [style for style in product(LINE_COLOURS, DASHES) if style not in chosen.values()]
    # Colours that no other line has come first, then dashes tell lines apart.
    free.sort(key=lambda style: (style[0] in taken, DASHES.index(style[1])))
    others = [name for name in labels if name not in chosen]
    chosen.update((name, free[n % len(free)]) for n, name in enumerate(others))
    return {name: chosen[name] for name in labels}


def curve_plot(curves: Mapping[str, Floats], xlabel: str, legend: bool = True) -> str:
    """Cumulative distributions of a time (ms) per policy, logarithmic in time."""
    drawn = styles(list(curves))
    lines = math.ceil(len(curves) / 2) if legend else 0
    height = 2.7 + 0.2 * lines
    with mpl.rc_context(RC):
        figure, axes = new_figure(WIDE_IN, height)
        for label, values in curves.items():
            colour, dash = drawn[label]
            shares = np.linspace(0.0, 100.0, max(len(values), 1))
            shown = values / 1000 if len(values) else np.array([np.nan])
            axes.plot(shown, shares, color=colour, linestyle=dash, label=label, lw=1.9)
        _log_axis(axes, [values[values > 0] / 1000 for values in curves.values()])
        axes.set(ylim=(0, 100), xlabel=xlabel, ylabel="% of requests within")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        top = 1 - (0.12 + 0.2 * lines) / height
        figure.subplots_adjust(top=top, right=1 - 0.25 / WIDE_IN)
        if legend:
            figure.legend(frameon=False, loc="upper center", ncols=2, handlelength=3.6)
        return as_svg(figure)


def hit_plot(views: Mapping[str, RunView]) -> str:
    """Hit rate of all workers together over time, a line per policy."""
    drawn = styles(list(views))
    with mpl.rc_context(RC):
        figure, axes = new_figure(WIDE_IN, 2.7)
        for label, view in views.items():
            colour, dash = drawn[label]
            times, rates = hit_rates(view.samples, WINDOWS)
            marker = "o" if np.count_nonzero(~np.isnan(rates)) < 2 else None
            axes.plot(times, 100 * rates, color=colour, linestyle=dash, lw=1.6, marker=marker)
        until_s = max((_end_s(view.samples) for view in views.values()), default=1.0)
        axes.set(xlim=(0, until_s), ylim=(0, 100), xlabel="time, s", ylabel="% of prompt tokens")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        figure.subplots_adjust(right=1 - 0.25 / WIDE_IN)
        return as_svg(figure)


def worker_map(samples: Samples, values: Any, top: float, until_s: float, log: bool = False) -> str:
    """`values` [samples, workers] as one line of cells a worker, coloured from 0 to `top`."""
    grid = on_grid(samples.time_ns, values, GRID_COLUMNS)
    workers = grid.shape[0]
    height = 1.5 if workers <= 16 else min(3.2, 1.2 + workers / 80)
    with mpl.rc_context(RC):
        figure, axes = new_figure(WIDTH_IN, height)
        if grid.size:
            shown = np.log1p(grid) / math.log1p(top) if log else grid / top
            axes.imshow(
                _enlarged(shown), cmap=BUSY_MAP, vmin=0.0, vmax=1.0, aspect="auto",
                interpolation="none", extent=(0, _end_s(samples), workers - 0.5, -0.5),
            )  # fmt: skip
        axes.set(xlim=(0, until_s), ylim=(max(workers, 1) - 0.5, -0.5), xlabel="time, s")
        step = next(n for n in LABEL_STEPS if workers <= MAX_LABELS * n or n == LABEL_STEPS[-1])
        axes.set(ylabel="worker", yticks=range(0, max(workers, 1), step))
        return as_svg(figure)


def copies_plot(hot: Sequence[HotPrefix], samples: Samples, workers: int, until_s: float) -> str:
    """On how many workers each of the hottest prefixes was over time."""
    times = samples.time_ns / 1e9
    shown = hot[:MOST_PREFIXES]
    height = 1.7 + 0.17 * len(shown)
    with mpl.rc_context(RC):
        figure, axes = new_figure(WIDTH_IN, height)
        for number, prefix in enumerate(shown):
            count = min(len(times), len(prefix.copies))
            copies = np.where(prefix.copies[:count] == NEVER, np.nan, prefix.copies[:count])
            axes.plot(
                times[:count], copies, color=LINE_COLOURS[number % len(LINE_COLOURS)], lw=1.6,
                linestyle=DASHES[number % len(DASHES)], drawstyle="steps-mid",
                label=f"{prefix.blocks:,} blocks, {prefix.requests:,} requests",
            )  # fmt: skip
        axes.set(xlim=(0, until_s), ylim=(0, workers * 1.05), xlabel="time, s", ylabel="copies")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        figure.subplots_adjust(top=1 - (0.1 + 0.17 * len(shown)) / height)
        if shown:
            figure.legend(frameon=False, loc="upper center", fontsize=8, handlelength=3)
        return as_svg(figure)


def split_plot(
    parts: Mapping[str, Sequence[float]], names: Sequence[str], xlabel: str, tokens: bool = False
) -> str:
    """One bar a policy, of the parts in `names`."""
    labels = list(parts)
    height = 0.95 + 0.3 * max(len(labels), 1)
    left = 0.25 + 0.078 * max((len(label) for label in labels), default=0)
    with mpl.rc_context(RC):
        figure, axes = new_figure(WIDE_IN, height)
        start = np.zeros(len(labels))
        for number, name in enumerate(names):
            widths = np.array([values[number] for values in parts.values()])
            colour = (TOKEN_COLOURS if tokens else TIME_COLOURS)[number]
            axes.barh(labels, widths, 0.62, start, color=colour, label=name)
            start += widths
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.subplots_adjust(
            left=min(left, 2.2) / WIDE_IN, top=1 - 0.32 / height, right=1 - 0.3 / WIDE_IN
        )
        figure.legend(frameon=False, loc="upper center", ncols=3, handlelength=1.2)
        return as_svg(figure)


def _enlarged(grid: Floats) -> Floats:
    """Cells repeated until there are pixels enough to be widened without a blur."""
    down, across = (max(1, math.ceil(SMOOTH_PX / side)) for side in grid.shape)
    return grid.repeat(down, axis=0).repeat(across, axis=1)


def _log_axis(axes: Axes, values: Sequence[Floats]) -> None:
    given = np.concatenate([*values, np.zeros(0)])
    if len(given):
        axes.set_xscale("log")
        steps = log_steps(float(given.min()), float(given.max()))
        axes.set_xlim(steps[0], steps[-1])
        axes.set_xticks(log_labels(steps))
    else:
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _end_s(samples: Samples) -> float:
    return float(samples.time_ns[-1]) / 1e9 if len(samples.time_ns) else 1.0
