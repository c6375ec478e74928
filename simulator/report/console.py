"""Replay results in the terminal: progress, and tables that fit it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from simulator.replay.run import ReplayProgress
from simulator.report.figures import Aggregate, Figure, aggregate, by_policy, counted
from simulator.report.page import MARK
from simulator.report.replay_page import replay_table, stage_tables
from simulator.report.row import ReplayRow

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


def replay_tables(rows: Sequence[ReplayRow], width: int) -> RenderableType:
    """Everything about `rows` for a terminal of `width` columns: tables, then the legend.

    As many figures as fit stand in the first table, the others in further ones below.
    """
    policies = aggregate(rows)
    table, shown = replay_table(rows)
    several = any(len(policy.seeds) > 1 for policy in policies)
    parts: list[RenderableType] = [_heading(rows, policies), Text(), *table.in_terminal(width)]
    for name, stages in stage_tables(rows):
        parts += [Text(f"by stage: {name}", style="bold"), *stages.in_terminal(width)]
    return Group(*parts, *_legend(shown, bool(table.best), several), *_losses(rows))


def print_report(console: Console, rows: Sequence[ReplayRow]) -> None:
    """The tables in the console's own width."""
    console.print(replay_tables(rows, console.width))


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
