"""Replay results in the terminal: progress, and tables that fit it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Self

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from simulator.replay.run import ReplayProgress
from simulator.report.figures import (
    FIGURES,
    NOTHING,
    Aggregate,
    Figure,
    Interval,
    aggregate,
    by_policy,
    counted,
    lead,
    ms,
    percent,
    whole,
)
from simulator.report.figures import Groups as console_Groups
from simulator.report.live_page import picture
from simulator.report.plots import (
    RC,
    RULE,
    WIDE_IN,
    as_svg,
    log_labels,
    log_steps,
    new_figure,
    styles,
)
from simulator.report.row import Groups, Ladders, ReplayRow, StageFigure, ladders, rates

QUIET_S = 2.0
LINE_EVERY_S = 10.0  # plain lines
REFRESHES_PER_S = 4
NS_PER_S = 1_000_000_000


class ProgressDisplay:
    """Shows one replay after another; `note` is a replay's `on_progress`. Lifetime: process.

    `note` may be called as often as one likes: it looks at the clock and draws a few times a second
    at most.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[told]}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=1.0, told="", visible=False)
        self._label = ""
        self._shown = False
        self.start("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def start(self, label: str) -> None:
        """The next replay begins; `label` names it, such as "hybrid, seed 2"."""
        self._label = label
        self._began_s = self._clock()
        self._next_s = self._began_s + QUIET_S

    def note(self, reached: ReplayProgress) -> None:
        """A replay got so far."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        share = reached.ended / reached.total if reached.total else reached.fraction
        told = progress_text(share, reached.ended, reached.now_ns, now_s - self._began_s)
        if not self._console.is_terminal:
            self._next_s = now_s + LINE_EVERY_S
            self._console.print(f"{self._label}: {share:.0%}, {told}", highlight=False)
            return
        self._next_s = now_s + 1 / REFRESHES_PER_S
        if not self._shown:
            self._progress.start()
            self._shown = True
        self._progress.update(
            self._task, completed=share, description=self._label, told=told, visible=True
        )
        self._progress.refresh()


def progress_text(share: float, requests: int, virtual_ns: int, passed_s: float) -> str:
    """Requests a second, virtual time reached, time left at the mean pace so far."""
    pace = requests / passed_s if passed_s > 0 else 0.0
    left = f", {span(passed_s * (1 - share) / share)} left" if 0 < share < 1 else ""
    return f"{pace:,.0f} requests/s, virtual {span(virtual_ns / NS_PER_S)}{left}"


def span(seconds: float) -> str:
    """A span of time: "42 s", "3:07 min", "2:00:15 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


GAP = 1  # the divider between two cells

Column = tuple[str, list[Text]]  # title, a cell for each line


def policy_tables(
    names: Sequence[str], columns: Sequence[Column], width: int
) -> list[RenderableType]:
    """Lines of `names` in as many tables as `width` columns need, an empty line after each."""
    room = width - max((len(name) for name in names), default=0) - GAP
    tables = [_table(names, part) for part in _parts(columns, room)]
    return [part for table in tables for part in (table, Text())]


def _parts(columns: Sequence[Column], room: int) -> list[list[Column]]:
    """The columns, cut where the next one would not fit; one at least in each part."""
    parts: list[list[Column]] = []
    left = -1
    for title, cells in columns:
        needed = max([len(title), *(len(text) for text in cells)]) + GAP
        if needed > left or not parts:
            parts.append([])
            left = room
        parts[-1].append((title, cells))
        left -= needed
    return parts


def _table(names: Sequence[str], columns: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("policy", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        table.add_row(name, *(cells[number] for _, cells in columns))
    return table


TTFT = StageFigure("TTFT p90, ms", lambda stage: stage.ttft_ms.p90, ms)
OUTPUT = StageFigure("output tokens/s", lambda stage: stage.output_tokens_per_s, whole)
HITS = StageFigure("hits", lambda stage: stage.hit_rate_tokens, percent)
STAGE_FIGURES = (TTFT, OUTPUT, HITS)
HEIGHT_IN = 2.7


def stage_tables(rows: Sequence[ReplayRow], width: int) -> list[RenderableType]:
    """A table of each figure, a column a rate; [] where no workload had stages."""
    groups = _groups(rows)
    columns = [f"{rate:g}/s" for rate in rates(groups)]
    if not columns:
        return []
    shown: list[RenderableType] = []
    for figure in STAGE_FIGURES:
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


MARK = "*"  # beside the colour, for terminals and eyes without


def replay_tables(rows: Sequence[ReplayRow], width: int) -> RenderableType:
    """Everything about `rows` for a terminal of `width` columns: tables, then the legend.

    As many figures as fit stand in the first table, the others in further ones below.
    """
    policies = aggregate(rows)
    shown = [one for one in FIGURES if any(policy.figures[one.name] for policy in policies)]
    several = any(len(policy.seeds) > 1 for policy in policies)
    marks = leaders(shown, by_policy(rows))
    columns = [_column(one, policies, marks.get(one.name)) for one in shown]
    names = [policy.label for policy in policies]
    return Group(
        _heading(rows, policies),
        Text(),
        *policy_tables(names, columns, width),
        *stage_tables(rows, width),
        *_legend(shown, bool(marks), several),
        *_losses(rows),
    )


def print_report(console: Console, rows: Sequence[ReplayRow]) -> None:
    """The tables in the console's own width."""
    console.print(replay_tables(rows, console.width))


def leaders(shown: Sequence[Figure], groups: console_Groups) -> dict[str, str]:
    """Name of a figure -> label of the policy to mark: ahead by more than the seeds' spread.

    With a single seed, which has no spread, whoever is ahead at all.
    """
    leads = [found for one in shown if (found := lead(one, groups)) is not None]
    return {found.figure.name: found.winner for found in leads if found.sure is not False}


def cell(one: Figure, value: Interval | None) -> str:
    """A mean and, of several seeds, what stands after ±."""
    if value is None:
        return NOTHING
    half = value.half
    return one.show(value.mean) + (f" ±{one.show(half)}" if half else "")


def _column(one: Figure, policies: Sequence[Aggregate], marked: str | None) -> Column:
    cells = []
    for policy in policies:
        text = cell(one, policy.figures[one.name])
        wins = policy.label == marked
        cells.append(Text(f"{text}{MARK}", style="bold green") if wins else Text(f"{text} "))
    return one.title, cells


def _heading(rows: Sequence[ReplayRow], policies: Sequence[Aggregate]) -> Text:
    if not rows:
        return Text("Nothing was replayed.")
    seeds = max(len(policy.seeds) for policy in policies)
    several = f", mean of {seeds} seeds ± its 95 % interval" if seeds > 1 else ""
    workers = sorted({len(row.workers) for row in rows})
    pool = " to ".join(str(count) for count in dict.fromkeys((workers[0], workers[-1])))
    noun = "worker" if workers == [1] else "workers"
    requests = max(row.requests for row in rows)
    text = f"{counted(requests, 'request')}, {pool} {noun}; times in ms{several}"
    return Text(text, style="bold")


def _legend(shown: Sequence[Figure], marked: bool, several: bool) -> list[Text]:
    lines = [Text(f"{one.title:<9} {one.meaning}", style="dim") for one in shown]
    if marked:
        told = "best, and by more than the seeds are apart" if several else "best of its column"
        lines.append(Text(f"{MARK:<9} {told}", style="dim"))
    return lines


def _losses(rows: Sequence[ReplayRow]) -> list[Text]:
    """What makes other figures look better than they are, or the workload smaller."""
    lines = []
    for label, own in by_policy(rows).items():
        codes: dict[str, int] = {}
        for row in own:
            for code, count in row.rejections.items():
                codes[code] = codes.get(code, 0) + count
        if codes:
            told = ", ".join(f"{code} {count:,}" for code, count in codes.items())
            lines.append(Text(f"{label} turned away: {told}", style="yellow"))
    wrong = max((row.trace_errors for row in rows), default=0)
    if wrong:
        text = f"{counted(wrong, 'wrong line')} of the source left out"
        lines.append(Text(text, style="yellow"))
    return lines
