"""The pictures of all reports, as SVG text."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from policies.load import name_of
from simulator.live.outcome import Outcome
from simulator.live.scrape import Sample
from simulator.replay.result import NEVER, HotPrefix, Samples
from simulator.report.figures import Figure as pictures_Figure
from simulator.report.figures import Interval
from simulator.report.view import Floats as pictures_Floats
from simulator.report.view import RunView, hit_rates, on_grid
from simulator.runs.points import Point
from simulator.runs.scenes import MAX_TTFT_MS, Ladder, SceneFigures

WORKER_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#5F6470",
)  # fmt: skip
POLICY_STYLES = {
    "round_robin": ("#E69F00", (0, (5, 2))),
    "kv_prefix": ("#D55E00", (0, (1, 1.2))),
    "kv_load": ("#009E73", (0, (6, 2, 1, 2))),
    "hybrid": ("#0072B2", "solid"),
    "warmset": ("#CC79A7", "solid"),
}
BUSY_MAP = "YlGnBu"
INK, RULE = "#2b2f36", "#c9ced6"
BINS = 24
CURVE_POINTS = 201
MAX_LABELS = 8
RC: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "warmroute",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": INK,
    "ytick.color": INK,
}

Floats = npt.NDArray[np.float64]


def share_plot(outcomes: Sequence[Outcome], workers: Sequence[str], speed: float) -> str:
    """Stacked shares of requests per worker over arrival time (model seconds)."""
    times = np.array([o.scheduled_s * speed for o in outcomes if o.worker is not None])
    rows = np.array([workers.index(o.worker) for o in outcomes if o.worker is not None])
    edges = np.linspace(0.0, max(1.0, float(times.max(initial=1.0))), BINS + 1)
    counts = np.array([np.histogram(times[rows == row], edges)[0] for row in range(len(workers))])
    shares = 100.0 * counts / np.maximum(counts.sum(axis=0), 1)
    with mpl.rc_context(RC):
        figure, axes = new_figure(3.1, 1.8)
        bottom = np.zeros(BINS)
        for row, share in enumerate(shares):
            axes.bar(
                edges[:-1], share, np.diff(edges), bottom, align="edge", linewidth=0.25,
                edgecolor="white", color=WORKER_COLOURS[row % len(WORKER_COLOURS)],
            )  # fmt: skip
            bottom += share
        axes.set(xlim=(0, edges[-1]), ylim=(0, 100), ylabel="% of requests")
        axes.set_xlabel("arrival, s")
        return as_svg(figure)


def busy_plot(samples: Sequence[Sample], speed: float, until_s: float) -> str:
    """Busy share of each worker over model time, one line of cells a worker."""
    times, busy = busy_shares(samples, speed)
    with mpl.rc_context(RC):
        figure, axes = new_figure(3.1, 1.7)
        if len(busy):
            lines = np.arange(busy.shape[1] + 1) - 0.5
            axes.pcolormesh(
                times, lines, busy.T, cmap=BUSY_MAP, vmin=0.0, vmax=1.0, rasterized=False
            )
            axes.set(ylim=(busy.shape[1] - 0.5, -0.5), yticks=range(busy.shape[1]))
        axes.set(xlim=(0, until_s), xlabel="time, s", ylabel="worker")
        return as_svg(figure)


def busy_shares(samples: Sequence[Sample], speed: float) -> tuple[Floats, Floats]:
    """(edges in model seconds [n], busy shares 0..1 [n - 1, workers]) between samples.

    Workers count a step when it ends, and a step can be longer than a sample is apart: what a
    stretch cannot hold was done in the stretches before it, and is put there.
    """
    times = np.array([sample.at_s for sample in samples])
    busy = np.array([[counters.busy_s for counters in sample.workers] for sample in samples])
    if len(samples) < 2:
        return times * speed, np.zeros((0, 0))
    grown, room = np.diff(busy, axis=0), np.diff(times)
    for row in range(len(room) - 1, 0, -1):
        held = np.minimum(grown[row], room[row])
        grown[row - 1] += grown[row] - held
        grown[row] = held
    return times * speed, np.clip(grown / room[:, None], 0.0, 1.0)


def ttft_plot(times_ms: dict[str, list[float]]) -> str:
    """Cumulative distribution of the time to first token per policy, logarithmic in time."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(4.6, 3.3)
        for policy, values in times_ms.items():
            colour, dash = POLICY_STYLES.get(policy, (INK, "solid"))
            percent = np.linspace(0.0, 100.0, CURVE_POINTS)
            seconds = np.percentile(values or [np.nan], percent) / 1000
            axes.plot(seconds, percent, color=colour, linestyle=dash, label=policy, lw=1.9)
        axes.set_xscale("log")
        given = [value / 1000 for values in times_ms.values() for value in values if value > 0]
        if given:
            steps = log_steps(min(given), max(given))
            axes.set_xlim(steps[0], steps[-1])
            axes.set_xticks(log_labels(steps))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(ylim=(0, 100), xlabel="time to first token, s", ylabel="% of requests within")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        # Room for the legend, and for half of a label under the axis' end.
        figure.subplots_adjust(top=1 - 0.5 / 3.3, right=1 - 0.25 / 4.6)
        figure.legend(frameon=False, loc="upper center", ncols=2, handlelength=3.6)
        return as_svg(figure)


def log_steps(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from the last at or below `low` to the first at or above `high`, above 0.

    Two at least, so that a logarithmic axis between them says how far apart its places are.
    """
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(n for n, step in enumerate(steps) if step <= low)
    last = min(n for n, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def log_labels(steps: Sequence[float]) -> list[float]:
    """The `steps` to label: all of them on a short axis, powers of ten on a long one."""
    if len(steps) <= MAX_LABELS:
        return list(steps)
    return [step for step in steps if math.log10(step).is_integer()]


def busy_scale(stops: int = 6) -> list[str]:
    """Colours of `busy_plot` from 0 to 100 %, as #rrggbb, for the page's legend."""
    colours = mpl.colormaps[BUSY_MAP](np.linspace(0.0, 1.0, stops))
    return [mpl.colors.to_hex(colour) for colour in colours]


def new_figure(width_in: float, height_in: float) -> tuple[Figure, Axes]:
    """An empty picture with the margins all of them have."""
    figure = Figure(figsize=(width_in, height_in))
    axes = figure.subplots()
    # Margins in inches, so that pictures one above the other have their axes in line.
    figure.subplots_adjust(
        left=0.55 / width_in, right=1 - 0.12 / width_in, bottom=0.45 / height_in,
        top=1 - 0.1 / height_in,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    return figure, axes


def as_svg(figure: Figure) -> str:
    """The picture as text; the same figure gives the same text."""
    buffer = io.StringIO()
    # Without a date the same rows draw the same picture.
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()


WAIT_BINS = 20
WINDOW_SAMPLES = 6  # stretches a share of hits is taken over: one alone has too few prompts

Curve = tuple[Floats, Floats]  # model seconds, values


def waits_over_time(outcomes: Sequence[Outcome], speed: float, until_s: float) -> Curve:
    """Middles of `WAIT_BINS` bins of arrivals, and the mean TTFT of each, in model seconds.

    NaN where nothing that was answered came.
    """
    told = [(o.scheduled_s * speed, o.ttft_ms * speed / 1000) for o in outcomes if o.ttft_ms]
    at_s, wait_s = np.array(told, np.float64).reshape(-1, 2).T
    edges = np.linspace(0.0, until_s, WAIT_BINS + 1)
    counts = np.histogram(at_s, edges)[0]
    sums = np.histogram(at_s, edges, weights=wait_s)[0]
    means = np.divide(sums, counts, out=np.full(WAIT_BINS, np.nan), where=counts > 0)
    return (edges[:-1] + edges[1:]) / 2, means


def hits_over_time(samples: Sequence[Sample], speed: float) -> Curve:
    """(model seconds, share of prompt tokens found cached, 0..1, over the samples before)."""
    times = np.array([sample.at_s for sample in samples]) * speed
    totals = np.array(
        [
            [sum(w.hit_tokens for w in s.workers), sum(w.query_tokens for w in s.workers)]
            for s in samples
        ]
    ).reshape(-1, 2)
    first = np.maximum(np.arange(len(times)) - WINDOW_SAMPLES, 0)
    hits, asked = (totals - totals[first]).T
    shares = np.divide(hits, asked, out=np.full(len(times), np.nan), where=asked > 0)
    return times, shares


def waits_plot(curves: Mapping[str, Curve]) -> str:
    """Mean time to first token over time of arrival, a line a policy; logarithmic."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(4.6, 2.9)
        _lines(axes, curves)
        values = np.concatenate([value for _, value in curves.values()])
        values = values[np.isfinite(values) & (values > 0)]
        if len(values):
            axes.set_yscale("log")
            steps = log_steps(float(values.min()), float(values.max()))
            axes.set_ylim(steps[0], steps[-1])
            axes.set_yticks(steps)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="arrival, s", ylabel="mean time to first token, s")
        figure.subplots_adjust(top=1 - 0.35 / 2.9)
        figure.legend(frameon=False, loc="upper center", ncols=3, handlelength=3.0)
        return as_svg(figure)


def hits_plot(curves: Mapping[str, Curve]) -> str:
    """Share of prompt tokens found in caches over time, a line a policy."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(4.6, 2.9)
        _lines(axes, {name: (at_s, 100 * share) for name, (at_s, share) in curves.items()})
        axes.set(ylim=(0, 100), xlabel="time, s", ylabel="% of prompt tokens cached")
        figure.subplots_adjust(top=1 - 0.35 / 2.9)
        figure.legend(frameon=False, loc="upper center", ncols=3, handlelength=3.0)
        return as_svg(figure)


def _lines(axes: Axes, curves: Mapping[str, Curve]) -> None:
    for policy, (at_s, values) in curves.items():
        colour, dash = POLICY_STYLES.get(policy, (INK, "solid"))
        axes.plot(at_s, values, color=colour, linestyle=dash, label=policy, lw=1.9)
    axes.set_xlim(left=0.0)
    axes.grid(True, which="major", color=RULE, linewidth=0.5)


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


def curve_plot(curves: Mapping[str, pictures_Floats], xlabel: str, legend: bool = True) -> str:
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


def _enlarged(grid: pictures_Floats) -> pictures_Floats:
    """Cells repeated until there are pixels enough to be widened without a blur."""
    down, across = (max(1, math.ceil(SMOOTH_PX / side)) for side in grid.shape)
    return grid.repeat(down, axis=0).repeat(across, axis=1)


def _log_axis(axes: Axes, values: Sequence[pictures_Floats]) -> None:
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


SWEEP_WIDTH_IN = 4.6
SWEEP_LINE_IN = 0.2  # of a legend
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
FAINT = 0.35


def front_plot(
    points: Sequence[Point],
    front: Sequence[Point],
    numbered: Mapping[int, Point],
    first: pictures_Figure,
    second: pictures_Figure,
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
    curves: Mapping[str, Sequence[tuple[float, Interval]]], xlabel: str, figure_of: pictures_Figure
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


def _joined(
    axes: Axes, front: Sequence[Point], first: pictures_Figure, second: pictures_Figure
) -> None:
    ordered = sorted((_value(p, first), _value(p, second)) for p in front)
    axes.plot(
        [x for x, _ in ordered], [y for _, y in ordered], color=INK, lw=0.9, alpha=0.6, zorder=2
    )


def _values(points: Sequence[Point], one: pictures_Figure) -> list[float]:
    return [_value(point, one) for point in points]


def _value(point: Point, one: pictures_Figure) -> float:
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


COMPARE_WIDTH_IN = 5.6
COMPARE_LINE_IN = 0.2
MAX_LINES = 8  # that can be told apart


def dots_plot(scene: SceneFigures) -> str:
    """Mean TTFT of every seed, a line of dots for each rule, the best on top; a bar: their mean."""
    rules = [rule for rule in scene.rules if rule.ttft_mean_ms]
    height = 0.8 + COMPARE_LINE_IN * max(len(rules), 1)
    with mpl.rc_context(RC):
        figure, axes = new_figure(COMPARE_WIDTH_IN, height)
        values: list[float] = []
        for place, rule in enumerate(rules):
            seeds = [ms / 1000 for ms in rule.ttft_by_seed_ms if ms]
            values += seeds
            assert rule.ttft_mean_ms is not None
            axes.scatter(seeds, [place] * len(seeds), s=14, alpha=0.55, color="#0072B2", lw=0)
            axes.scatter([rule.ttft_mean_ms / 1000], [place], s=70, marker="|", color=INK, lw=1.4)
        if scene.collapse_ms:
            axes.axvline(scene.collapse_ms / 1000, color="#D55E00", lw=0.9, ls=(0, (4, 2)))
        axes.set_xscale("log")
        if values:
            steps = log_steps(min(values), max(values))
            axes.set_xlim(steps[0], steps[-1])
            axes.set_xticks(log_labels(steps))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(rules)), [rule.policy[:34] for rule in rules])
        axes.set(ylim=(len(rules) - 0.5, -0.5), xlabel="mean time to first token of a seed, s")
        axes.grid(True, which="major", axis="x", color=RULE, linewidth=0.5)
        figure.subplots_adjust(left=0.4, top=1 - 0.1 / height, bottom=0.5 / height)
        return as_svg(figure)


def ladder_plot(found: Ladder, scenes: Mapping[str, SceneFigures]) -> str:
    """Mean TTFT against load, a line for each of the rules that take most."""
    names = [rule.policy for rule in found.rules[:MAX_LINES]]
    drawn = styles(names)
    lines = math.ceil(len(names) / 2)
    height = 2.7 + COMPARE_LINE_IN * lines
    with mpl.rc_context(RC):
        figure, axes = new_figure(COMPARE_WIDTH_IN, height)
        values: list[float] = [MAX_TTFT_MS / 1000]
        for name in names:
            points = _points(name, found, scenes)
            colour, dash = drawn[name]
            values += [y for _, y in points]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, linestyle=dash,
                lw=1.6, marker="o", ms=3, label=name[:34],
            )  # fmt: skip
        axes.axhline(MAX_TTFT_MS / 1000, color=RULE, lw=1.0)
        axes.set_yscale("log")
        steps = log_steps(min(values), max(values))
        axes.set_ylim(steps[0], steps[-1])
        axes.set_yticks(log_labels(steps))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=found.load_unit, ylabel="mean time to first token, s")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        figure.subplots_adjust(
            top=1 - (0.15 + COMPARE_LINE_IN * lines) / height, left=0.72 / COMPARE_WIDTH_IN
        )
        figure.legend(frameon=False, loc="upper center", ncols=2, handlelength=2.6)
        return as_svg(figure)


def _points(
    policy: str, found: Ladder, scenes: Mapping[str, SceneFigures]
) -> Sequence[tuple[float, float]]:
    return [
        (load, rule.ttft_mean_ms / 1000)
        for load, name in zip(found.loads, found.scenes, strict=True)
        for rule in scenes[name].rules
        if rule.policy == policy and rule.ttft_mean_ms
    ]
