"""The losses of each policy as bars that stand on the bound: one picture, as SVG text."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from simulator.limits.losses import NAMES
from simulator.limits.report import BoundReport

# Okabe and Ito (2008): colours that stay apart for colour-blind readers; one per loss, then white.
COLOURS = ("#CC79A7", "#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#c9ced6")
BOUND, BEST, INK = "#009E73", "#2b2f36", "#2b2f36"
RC: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "warmroute",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c9ced6",
    "xtick.color": INK,
    "ytick.color": INK,
}
ROW_IN, FRAME_IN, WIDTH_IN = 0.42, 1.75, 6.4


def loss_plot(report: BoundReport) -> str:
    """Bars of mean time to first token, in seconds: the bound, then each loss to its right.

    A loss below 0 (an effect that helped) is drawn from the end of the bar back, hatched. Lines
    mark the bound and the best achieved. Policies without losses are left out. The axis ends
    where all bars but the longest fit, if that is 20 times the others; the rest is written there.
    """
    shown = [one for one in report.distances if one.losses and one.ttft_ms is not None]
    bound_s = report.bounds.ttft_ms["mean"].value / 1e3
    height = FRAME_IN + ROW_IN * max(1, len(shown))
    with mpl.rc_context(RC):
        figure = Figure(figsize=(WIDTH_IN, height))
        axes = figure.subplots()
        left_in = 0.4 + 0.075 * max((len(one.policy) for one in shown), default=8)
        figure.subplots_adjust(
            left=min(0.45, left_in / WIDTH_IN),
            right=0.97,
            top=1 - 0.85 / height,
            bottom=0.55 / height,
        )
        ends = []
        for row, one in enumerate(shown):
            end_s = bound_s
            axes.barh(row, bound_s, color=BOUND, height=0.62)
            for loss, colour in zip(reversed(one.losses), reversed(COLOURS), strict=True):
                width_s = loss.ttft_ms / 1e3
                hatch = "////" if width_s < 0 else None
                axes.barh(
                    row, width_s, left=end_s, color=colour, height=0.62, hatch=hatch,
                    edgecolor="white", linewidth=0.4,
                )  # fmt: skip
                end_s += width_s
            ends.append(end_s)
        limit_s = _limit(ends, bound_s)
        for row, end_s in enumerate(ends):
            beyond = end_s > limit_s
            axes.text(
                min(end_s, limit_s), row, f" {end_s:,.2f} s" + (" →" if beyond else ""),
                ha="right" if beyond else "left", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            )  # fmt: skip
        axes.axvline(bound_s, color=BOUND, linewidth=1.2)
        if report.achieved:
            best = report.achieved[0]
            axes.axvline(best.ttft_ms / 1e3, color=BEST, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set(xlim=(0, limit_s * 1.12), xlabel="mean time to first token, s")
        axes.set_yticks(range(len(shown)), [one.policy for one in shown])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        _legend(figure, report)
        return _svg(figure)


def _limit(ends: list[float], bound_s: float) -> float:
    """Where the axis ends."""
    ordered = sorted([bound_s, *ends])
    if len(ordered) > 2 and ordered[-1] > 20 * ordered[-2]:
        return 2 * ordered[-2]
    return ordered[-1] or 1.0


def _legend(figure: Figure, report: BoundReport) -> None:
    patch, line = mpl.patches.Patch, mpl.lines.Line2D
    handles: list[Any] = [patch(color=BOUND, label="bound")]
    handles += [
        patch(color=colour, label=name)
        for name, colour in zip(reversed(NAMES), reversed(COLOURS), strict=True)
    ]
    if report.achieved:
        label = f"best achieved: {report.achieved[0].name}"
        handles.append(line([], [], color=BEST, linestyle=(0, (4, 2)), label=label))
    figure.legend(handles=handles, loc="upper center", ncols=4, frameon=False, fontsize=8)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Without a date the same rows draw the same picture.
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()
