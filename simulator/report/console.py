"""Replay results in the terminal: tables that fit it, the best marked, the columns explained."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from simulator.report.aggregate import Aggregate, Interval, aggregate, by_policy
from simulator.report.figures import FIGURES, Figure
from simulator.report.leads import Groups, lead
from simulator.report.row import ReplayRow
from simulator.report.stages_shown import stage_tables
from simulator.report.tables import Column, policy_tables
from simulator.wording import NOTHING, counted

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


def leaders(shown: Sequence[Figure], groups: Groups) -> dict[str, str]:
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
