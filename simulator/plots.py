"""The report's pictures, as SVG text: shares over time, busy workers over time, TTFT curves.

Colours are those of Okabe and Ito (2008), which stay apart for colour-blind readers; curves differ
in dash as well. Pictures are small: the page lays them side by side or one below the other.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from simulator.outcome import Outcome
from simulator.scrape import Sample

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
