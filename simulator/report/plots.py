"""The pictures of all reports, as SVG text.

The colours are from Okabe and Ito (2008), because colour-blind readers can tell them apart; lines
differ in dash as well. Pictures are small: a page lays them side by side or one below the other.
They have no background; `for_page` adds colours for a dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import numpy as np
import numpy.typing as npt

from simulator.replay.result import NEVER, HotPrefix, Samples
from simulator.report.view import on_grid

# From the extra `demo`, because it is large; without it pages have no pictures.
DRAWS = find_spec("matplotlib") is not None
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MISSING = (
    "matplotlib is not installed: pip install 'matplotlib>=3.11' (or '.[demo]' in the checkout)"
)
NOT_DRAWN = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="28" viewBox="0 0 560 28">'
    f'<text x="4" y="18" font-family="sans-serif" font-size="11">{MISSING}</text></svg>'
)
WORKER_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#5F6470",
)  # fmt: skip
POLICY_STYLES: dict[str, Style] = {
    "round_robin": ("#E69F00", (0, (5, 2))),
    "kv_prefix": ("#D55E00", (0, (1, 1.2))),
    "kv_load": ("#009E73", (0, (6, 2, 1, 2))),
    "hybrid": ("#0072B2", "solid"),
    "warmset": ("#CC79A7", "solid"),
}
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
# The colours of the palette that are dark enough for a line on white.
LINE_COLOURS = tuple(colour for colour in WORKER_COLOURS if colour != "#F0E442")
TIME_COLOURS = ("#CC79A7", "#E69F00", "#0072B2")
TOKEN_COLOURS = ("#009E73", "#E69F00", "#D55E00")
BUSY = "#2a86c8"  # of `worker_map` at its top; lower values are more transparent
INK, RULE, WARNING, PAPER = "#2b2f36", "#c9ced6", "#D55E00", "#ffffff"
DARK = {INK: "#d5dae2", RULE: "#454d59", PAPER: "#1e242c"}  # their replacements on a dark page
NARROW_IN, WIDE_IN = 3.1, 4.6
LINE_IN = 0.2  # of a legend
GRID_COLUMNS = 240  # stretches of time in a map of workers
SMOOTH_PX = 600  # browsers blur a picture of fewer pixels when they widen it
MOST_PREFIXES = 5
MAX_LABELS = 8
LABEL_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
FAINT = 0.35
FAINTEST = 0.08  # opacity of a cell at 0
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
Values = Sequence[float] | Floats
Line = tuple[Values, Values]  # x and y of its points; NaN: a gap
Band = tuple[Values, Values]  # low and high beside a line's points
Style = tuple[str, Any]  # colour, dash
Arguments = ParamSpec("Arguments")


def drawn(draw: Callable[Arguments, str]) -> Callable[Arguments, str]:
    """Make a drawing function return a line of text instead if matplotlib is not installed."""

    @wraps(draw)
    def picture(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        if not DRAWS:
            return NOT_DRAWN
        import matplotlib as mpl  # here and below: it takes a second

        with mpl.rc_context(RC):
            return draw(*args, **kwargs)

    return picture


@drawn
def line_plot(
    lines: Mapping[str, Line],
    xlabel: str,
    ylabel: str,
    *,
    log: Literal["", "x", "y"] = "",
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float | None, float | None] | None = None,
    points: bool = False,
    steps: bool = False,
    whole_x: bool = False,
    bands: Mapping[str, Band] | None = None,
    limit: float | None = None,
    width_in: float = WIDE_IN,
) -> str:
    """Draw a line for each label; `points` are marked, `limit` is a horizontal line at that y.

    With `whole_x`, x is a count, and nothing is labelled between two whole numbers.
    """
    from matplotlib.ticker import MaxNLocator

    chosen = styles(list(lines))
    rows = math.ceil(len(lines) / (1 if width_in < WIDE_IN else 2))
    height = (1.7 if width_in < WIDE_IN else 2.7) + LINE_IN * rows
    canvas, axes = _canvas(width_in, height, legend_rows=rows, left_in=0.72)
    for label, (xs, ys) in lines.items():
        colour, dash = chosen[label]
        alone = np.count_nonzero(~np.isnan(np.asarray(ys, np.float64))) < 2
        axes.plot(
            xs, ys, color=colour, linestyle=dash, label=label[:34], lw=1.7, ms=3,
            marker="o" if points or alone else None,
            drawstyle="steps-mid" if steps else "default",
        )  # fmt: skip
        if bands:
            axes.fill_between(xs, *bands[label], color=colour, alpha=0.18, linewidth=0)
    if limit is not None:
        axes.axhline(limit, color=RULE, lw=1.0)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if log:
        of = 0 if log == "x" else 1
        given = [*(v for line in lines.values() for v in line[of]), *([limit] if limit else [])]
        _log_axis(axes, log, [value for value in given if value and value > 0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set(xlim=xlim, ylim=ylim) if ylim else axes.set(xlim=xlim)
    if steps:
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(MAX_LABELS, integer=True))
    axes.grid(True, which="major", color=RULE, linewidth=0.5)
    _legend(canvas, columns=1 if width_in < WIDE_IN else 2)
    return _as_svg(canvas)


def curve_plot(curves: Mapping[str, Floats], xlabel: str) -> str:
    """Draw cumulative distributions of a time: `curves` are its quantiles in ms, evenly spaced."""
    nothing = np.full(1, np.nan)
    lines: dict[str, Line] = {
        label: (values / 1000 if len(values) else nothing, np.linspace(0, 100, max(len(values), 1)))
        for label, values in curves.items()
    }
    return line_plot(lines, xlabel, "% of requests within", log="x", ylim=(0, 100))


def copies_plot(hot: Sequence[HotPrefix], samples: Samples, workers: int, until_s: float) -> str:
    """Draw how many workers held each of the hottest prefixes over time."""
    times = samples.time_ns / 1e9
    lines: dict[str, Line] = {}
    for prefix in hot[:MOST_PREFIXES]:
        count = min(len(times), len(prefix.copies))
        copies = np.where(prefix.copies[:count] == NEVER, np.nan, prefix.copies[:count])
        lines[f"{prefix.blocks:,} blocks, {prefix.requests:,} requests"] = (times[:count], copies)
    xlim, ylim = (0.0, until_s), (0.0, workers * 1.05)
    return line_plot(
        lines, "time, s", "copies", xlim=xlim, ylim=ylim, steps=True, width_in=NARROW_IN
    )


@drawn
def share_plot(counts: npt.NDArray[np.int64], edges: Floats) -> str:
    """Draw the stacked shares of requests per worker over time.

    `counts` has the shape [workers, intervals between `edges`].
    """
    shares = 100.0 * counts / np.maximum(counts.sum(axis=0), 1)
    canvas, axes = _canvas(NARROW_IN, 1.8)
    bottom = np.zeros(len(edges) - 1)
    for row, share in enumerate(shares):
        axes.bar(
            edges[:-1], share, np.diff(edges), bottom, align="edge", linewidth=0.25,
            edgecolor=PAPER, color=WORKER_COLOURS[row % len(WORKER_COLOURS)],
        )  # fmt: skip
        bottom += share
    axes.set(xlim=(0, edges[-1]), ylim=(0, 100), ylabel="% of requests", xlabel="arrival, s")
    return _as_svg(canvas)


@drawn
def bars_plot(values: Sequence[int], top: int, policy: str, ylabel: str) -> str:
    """Draw a bar for each worker with its value above, in the policy's colour, on a scale
    to `top`.
    """
    from matplotlib.ticker import MaxNLocator

    canvas, axes = _canvas(WIDE_IN, 2.4, left_in=0.62)
    axes.bar(range(len(values)), values, 0.72, color=styles([policy])[policy][0])
    for place, value in enumerate(values):
        axes.annotate(f"{value:,}", (place, value), (0, 2), textcoords="offset points", ha="center")
    axes.set(xlabel="worker", ylabel=ylabel, ylim=(0, 1.08 * top))
    axes.set_xticks(range(0, len(values), _worker_step(len(values))))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    return _as_svg(canvas)


@drawn
def worker_map(samples: Samples, values: Any, top: float, until_s: float, log: bool = False) -> str:
    """Draw `values` [samples, workers] as one line of cells for each worker, coloured from 0 to
    `top`.
    """
    grid = on_grid(samples.time_ns, values, GRID_COLUMNS)
    workers = grid.shape[0]
    height = 1.75 if workers <= 16 else min(3.2, 1.2 + workers / 80)
    canvas, axes = _canvas(NARROW_IN, height)
    if grid.size:
        shown = np.log1p(grid) / math.log1p(top) if log else grid / top
        axes.imshow(
            _shades(_enlarged(shown)), aspect="auto", interpolation="none",
            extent=(0, float(samples.time_ns[-1]) / 1e9, workers - 0.5, -0.5),
        )  # fmt: skip
    axes.set(xlim=(0, until_s), ylim=(max(workers, 1) - 0.5, -0.5), xlabel="time, s")
    axes.set(ylabel="worker", yticks=range(0, max(workers, 1), _worker_step(workers)))
    return _as_svg(canvas)


@drawn
def split_plot(
    parts: Mapping[str, Sequence[float]], names: Sequence[str], xlabel: str, tokens: bool = False
) -> str:
    """Draw one stacked bar for each policy, made of the parts in `names`."""
    from matplotlib.ticker import MaxNLocator

    labels = list(parts)
    height = 0.95 + 0.3 * max(len(labels), 1)
    left_in = min(2.2, 0.25 + 0.078 * max((len(label) for label in labels), default=0))
    canvas, axes = _canvas(WIDE_IN, height, legend_rows=1, left_in=left_in)
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
    _legend(canvas, columns=3, handlelength=1.2)
    return _as_svg(canvas)


@drawn
def front_plot(
    groups: Mapping[str, Sequence[tuple[float, float, bool]]],
    front: Sequence[tuple[float, float]],
    numbered: Mapping[int, tuple[float, float]],
    xlabel: str,
    ylabel: str,
    *,
    percent: bool,
    log: bool,
) -> str:
    """Draw points by group, and join the points of the front.

    Each point is (x, y, whether it is a rival of others).
    """
    rows = math.ceil(len(groups) / 2)
    drawn = styles(list(groups))
    canvas, axes = _canvas(WIDE_IN, 3.0 + LINE_IN * rows, legend_rows=rows, left_in=0.72)
    axes.plot(*zip(*sorted(front), strict=True), color=INK, lw=0.9, alpha=0.6, zorder=2)
    for number, (name, points) in enumerate(groups.items()):
        look: Any = {"s": 22, "marker": MARKERS[number % len(MARKERS)], "color": drawn[name][0]}
        axes.scatter([], [], linewidths=0, label=name, **look)
        for x, y, rival in points:
            axes.scatter(x, y, alpha=1.0 if rival else FAINT, linewidths=0, zorder=3, **look)
    for label, place in numbered.items():
        axes.annotate(
            str(label), place, (4, 4), textcoords="offset points", fontsize=8,
            fontweight="bold", color=INK, zorder=4,
        )  # fmt: skip
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if log:
        _log_axis(axes, "y", [y for own in groups.values() for _, y, _ in own if y > 0])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.grid(True, which="major", color=RULE, linewidth=0.5)
    _legend(canvas, columns=2)
    return _as_svg(canvas)


@drawn
def dots_plot(seeds: Mapping[str, tuple[Sequence[float], float]], xlabel: str, limit: float) -> str:
    """Draw a row of dots for each label, one per seed, with a bar at their mean.

    A `limit` other than 0 is drawn as a vertical line.
    """
    height = 0.8 + LINE_IN * max(len(seeds), 1)
    canvas, axes = _canvas(5.6, height, left_in=2.24)
    for place, (values, mean) in enumerate(seeds.values()):
        axes.scatter(values, [place] * len(values), s=14, alpha=0.75, color=BUSY, lw=0)
        axes.scatter([mean], [place], s=70, marker="|", color=INK, lw=1.4)
    if limit:
        axes.axvline(limit, color=WARNING, lw=0.9, ls=(0, (4, 2)))
    _log_axis(axes, "x", [value for values, _ in seeds.values() for value in values])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(seeds)), [label[:34] for label in seeds])
    axes.set(ylim=(len(seeds) - 0.5, -0.5), xlabel=xlabel)
    axes.grid(True, which="major", axis="x", color=RULE, linewidth=0.5)
    return _as_svg(canvas)


@drawn
def errors_plot(points: Mapping[str, tuple[Floats, Floats]], tolerance: float) -> str:
    """Draw a panel for each kind of step: the seconds that a table has for it, and the error of a
    model against the table.

    `points` has for each kind float64[rows] of seconds, and of model / table - 1. The band shows
    `tolerance`.
    """
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(2 * WIDE_IN, 2 * NARROW_IN), layout="constrained")
    panels = canvas.subplots(2, 2, sharey=True).flat
    for axes, (kind, (seconds, off)), colour in zip(
        panels, points.items(), LINE_COLOURS, strict=False
    ):
        axes.axhspan(-100 * tolerance, 100 * tolerance, color=RULE, alpha=FAINT, lw=0)
        axes.axhline(0.0, color=INK, lw=0.8)
        axes.scatter(1e3 * seconds, 100 * off, s=7, color=colour, alpha=0.5, lw=0, rasterized=True)
        axes.set_xscale("log")
        axes.set_title(f"{kind}, {len(seconds):,} steps", fontsize=9)
        axes.set_xlabel("ms by the table")
        axes.set_ylabel("profile / table - 1, %")
        axes.spines[["top", "right"]].set_visible(False)
    return _as_svg(canvas)


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return the colour and dash of each policy's line: the policy's own if it has one, else the
    next free one.
    """
    known = [name for name in labels if name in POLICY_STYLES]
    chosen: dict[str, Style] = {name: POLICY_STYLES[name] for name in known}
    taken = [colour for colour, _ in chosen.values()]
    free = [style for style in product(LINE_COLOURS, DASHES) if style not in chosen.values()]
    # Colours that no other line has come first, then dashes tell lines apart.
    free.sort(key=lambda style: (style[0] in taken, DASHES.index(style[1])))
    others = [name for name in labels if name not in chosen]
    chosen.update((name, free[n % len(free)]) for n, name in enumerate(others))
    return {name: chosen[name] for name in labels}


def log_steps(low: float, high: float) -> list[float]:
    """Return the steps 1, 2, 5, 10, ... that enclose `low` and `high`, both above 0.

    There are at least two steps, so that a logarithmic axis between them has a scale.
    """
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(n for n, step in enumerate(steps) if step <= low)
    last = min(n for n, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def log_labels(steps: Sequence[float]) -> list[float]:
    """Return the `steps` to label: all of them on a short axis, powers of ten on a long one."""
    if len(steps) <= MAX_LABELS:
        return list(steps)
    return [step for step in steps if math.log10(step).is_integer()]


def busy_scale() -> tuple[str, str]:
    """Return the colours of `worker_map` at 0 and at its top, as #rrggbbaa, for a page's legend."""
    return f"{BUSY}{round(255 * FAINTEST):02x}", f"{BUSY}ff"


def for_page(svg: str) -> str:
    """Return the picture with added colours that a browser uses if it shows the page in
    dark mode.
    """
    names = {colour: f"var(--c{number})" for number, colour in enumerate(DARK)}
    light = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(DARK))
    dark = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(DARK.values()))
    modes = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    drawn = re.sub("|".join(DARK), lambda found: names[found[0]], svg)
    return drawn.replace("</style>", f"{modes}</style>", 1)


def _log_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Give the axes a logarithmic scale around the `values`, which are all above 0."""
    from matplotlib.ticker import NullFormatter

    if not len(values):
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", color=INK)
        return
    steps = log_steps(float(min(values)), float(max(values)))
    limits = {f"{which}lim": (steps[0], steps[-1])}
    axes.set(**{f"{which}scale": "log"}, **limits)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(log_labels(steps))
    axis.set_minor_formatter(NullFormatter())


def _enlarged(grid: Floats) -> Floats:
    """Return the grid with its cells repeated, so that a browser can widen it without a blur."""
    down, across = (max(1, math.ceil(SMOOTH_PX / side)) for side in grid.shape)
    return grid.repeat(down, axis=0).repeat(across, axis=1)


def _worker_step(workers: int) -> int:
    """Return n such that an axis numbers every n-th worker."""
    return next(n for n in LABEL_STEPS if workers <= MAX_LABELS * n or n == LABEL_STEPS[-1])


def _shades(grid: Floats) -> Floats:
    """Return red, green, blue and opacity of cells whose values are from 0 to 1."""
    from matplotlib.colors import to_rgb

    shades = np.empty((*grid.shape, 4))
    shades[..., :3] = to_rgb(BUSY)
    shades[..., 3] = FAINTEST + (1 - FAINTEST) * np.clip(grid, 0.0, 1.0)
    return shades


def _canvas(
    width_in: float, height_in: float, legend_rows: int = 0, left_in: float = 0.55
) -> tuple[Canvas, Axes]:
    """Return an empty picture; its margins are in inches, so that pictures in a column line up."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width_in, height_in))
    axes = canvas.subplots()
    canvas.subplots_adjust(
        left=left_in / width_in, right=1 - (0.25 if legend_rows else 0.12) / width_in,
        bottom=0.45 / height_in, top=1 - (0.12 + LINE_IN * legend_rows) / height_in,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    return canvas, axes


def _legend(canvas: Canvas, columns: int, handlelength: float = 3.0) -> None:
    if not canvas.axes[0].get_legend_handles_labels()[0]:
        return
    canvas.legend(
        frameon=False, loc="upper center", ncols=columns, handlelength=handlelength,
        fontsize=8 if columns == 1 else None,
    )  # fmt: skip


def _as_svg(canvas: Canvas) -> str:
    """Return the picture as SVG text; the same figure gives the same text."""
    buffer = io.StringIO()
    # Without a date the same rows draw the same picture.
    canvas.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()
