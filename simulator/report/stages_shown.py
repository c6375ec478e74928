"""A ladder of loads for people: tables in a terminal, pictures on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from rich.console import RenderableType
from rich.text import Text

from simulator.page import picture
from simulator.plots import RC, RULE, as_svg, log_labels, log_steps, new_figure
from simulator.report.aggregate import by_policy
from simulator.report.figures import ms
from simulator.report.pictures import WIDE_IN, styles
from simulator.report.row import ReplayRow
from simulator.report.stages import Groups, Ladders, StageFigure, ladders, rates
from simulator.report.tables import policy_tables
from simulator.wording import percent, whole

TTFT = StageFigure("TTFT p90, ms", lambda stage: stage.ttft_ms.p90, ms)
OUTPUT = StageFigure("output tokens/s", lambda stage: stage.output_tokens_per_s, whole)
HITS = StageFigure("hits", lambda stage: stage.hit_rate_tokens, percent)
FIGURES = (TTFT, OUTPUT, HITS)
HEIGHT_IN = 2.7


def stage_tables(rows: Sequence[ReplayRow], width: int) -> list[RenderableType]:
    """A table of each figure, a column a rate; [] where no workload had stages."""
    groups = _groups(rows)
    columns = [f"{rate:g}/s" for rate in rates(groups)]
    if not columns:
        return []
    shown: list[RenderableType] = []
    for figure in FIGURES:
        ladder = ladders(groups, figure.of)
        cells = [
            [Text(figure.show(v[number])) for v in ladder.values()]
            for number in range(len(columns))
        ]
        shown.append(Text(f"by stage: {figure.name}", style="bold"))
        shown += policy_tables(list(ladder), list(zip(columns, cells, strict=True)), width)
    return shown


def stage_section(rows: Sequence[ReplayRow]) -> str:
    """The page's section, as HTML: TTFT and output against the rate; "" without stages."""
    groups = _groups(rows)
    offered = rates(groups)
    if not offered:
        return ""
    figures = ""
    for figure, log in ((TTFT, True), (OUTPUT, False)):
        ladder = ladders(groups, figure.of)
        alt = f"{figure.name} against the rate. " + "; ".join(
            f"{label}: {figure.show(values[0])} at {offered[0]:g}/s, {figure.show(values[-1])} at "
            f"{offered[-1]:g}/s"
            for label, values in ladder.items()
        )
        svg = ladder_plot(offered, ladder, figure.name, log)
        figures += (
            f"<figure>{picture(svg, alt)}<figcaption>{escape(figure.name)}</figcaption></figure>"
        )
    return (
        '<h2>As the load rises</h2><p class="soft">Each stage of the workload by its rate: '
        "requests that arrived in it, output until its last answer; the mean of all seeds.</p>"
        f'<div class="curves">{figures}</div>'
    )


def ladder_plot(offered: Sequence[float], ladder: Ladders, ylabel: str, log: bool) -> str:
    """Lines of a figure over rates as SVG text, one a policy; `log`: the figure's axis."""
    drawn = styles(list(ladder))
    lines = math.ceil(len(ladder) / 2)
    height = HEIGHT_IN + 0.2 * lines
    with mpl.rc_context(RC):
        canvas, axes = new_figure(WIDE_IN, height)
        for label, values in ladder.items():
            colour, dash = drawn[label]
            shown = [math.nan if value is None else value for value in values]
            axes.plot(
                offered, shown, color=colour, linestyle=dash, label=label, lw=1.6, marker="o", ms=3
            )
        axes.set(xlabel="requests per second", ylabel=ylabel)
        if log:
            _log_axis(axes, [v for values in ladder.values() for v in values if v])
        else:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        canvas.subplots_adjust(
            left=0.9 / WIDE_IN, top=1 - (0.12 + 0.2 * lines) / height, right=1 - 0.25 / WIDE_IN
        )
        canvas.legend(frameon=False, loc="upper center", ncols=2, handlelength=3.6)
        return as_svg(canvas)


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    if not values:
        return
    axes.set_yscale("log")
    steps = log_steps(min(values), max(values))
    axes.set_ylim(steps[0], steps[-1])
    axes.set_yticks(log_labels(steps))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _groups(rows: Sequence[ReplayRow]) -> Groups:
    return {label: [row.stages for row in own] for label, own in by_policy(rows).items()}
