"""Replay results in the terminal: the progress of a replay, and tables that fit the width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from simulator.replay.run import ReplayProgress
from simulator.report.board import Board, span
from simulator.report.figures import (
    Aggregate,
    Figure,
    aggregate,
    by_policy,
    counted,
    marks,
    meaning_of,
)
from simulator.report.page import MARK
from simulator.report.replay_page import MORE, replay_table, stage_tables, versus_table
from simulator.report.row import ReplayRow
from simulator.traces.job import JobStream

NS_PER_S = 1_000_000_000


def show_replay(board: Board, name: str, reached: ReplayProgress) -> None:
    """Show how far a replay is, its requests per second so far, and the virtual time it has
    reached.

    If the source has been read to its end (a small file is read at once), the share that was read
    does not say how far the replay is; then the number of requests is shown instead.
    """
    share = reached.ended / reached.total if reached.total else reached.fraction
    known = share if reached.total or 0 < share < 1 else None
    far = f"{reached.ended:,} requests" if known is None else f"{known:.0%}"
    passed_s = board.passed_s(name)
    pace = reached.ended / passed_s if passed_s > 0 else 0.0
    virtual = span(reached.now_ns / NS_PER_S)
    board.show(name, known, f"{far}, {pace:,.0f} requests/s, virtual {virtual}")


def replay_tables(rows: Sequence[ReplayRow], width: int) -> RenderableType:
    """Return all tables of `rows`, then the legend, for a terminal of `width` columns. The first
    table has as many figures as fit; further tables have the other figures.
    """
    policies = aggregate(rows)
    table, shown = replay_table(rows)
    several = any(len(policy.seeds) > 1 for policy in policies)
    parts: list[RenderableType] = [_heading(rows, policies), Text(), *table.in_terminal(width)]
    beside, cells, wide = versus_table(rows), table.cells, ""
    if beside is not None:
        title, compared, wide = beside
        parts += [Text(title, style="bold"), *compared.in_terminal(width)]
        cells += compared.cells
    noise = [line for line in (marks(cells, MORE), wide) if line]
    parts += [Text("\n".join([*noise, ""]))] if noise else []
    for name, stages in stage_tables(rows):
        parts += [Text(f"by stage: {name}", style="bold"), *stages.in_terminal(width)]
    legend = _legend(rows, shown, bool(table.best), several)
    return Group(*parts, *legend, *_losses(rows))


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


def _legend(
    rows: Sequence[ReplayRow], shown: Sequence[Figure], marked: bool, several: bool
) -> list[Text]:
    lines = [Text(f"{one.title:<9} {meaning_of(one, rows)}", style="dim") for one in shown]
    if marked:
        told = "best, and by more than the seeds are apart" if several else "best of its column"
        lines.append(Text(f"{MARK:<9} {told}", style="dim"))
    return lines


def _losses(rows: Sequence[ReplayRow]) -> list[Text]:
    """Return warnings about refused requests and about wrong lines of the trace.

    Both matter to a reader: refusals make other figures look better than they are, and wrong lines
    make the workload smaller.
    """
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


# The options that serve more requests, by a refusal's code.
REMEDIES = {
    "kv_capacity": "more --kv-tokens",
    "hold_timeout": "more --workers, a lower --rate or a longer --hold-s",
    "hold_queue_full": "more --workers or a lower --rate",
    "router_full": "more --workers or a lower --rate",
}


def most_unserved(rows: Sequence[ReplayRow]) -> list[str]:
    """Return one line for each replay that completed less than half of its requests, or none at
    all.
    """
    lines = []
    for label, own in by_policy(rows).items():
        for row in own:
            if row.completed and 2 * row.completed >= row.requests:
                continue
            causes = [f"{code} {count:,}" for code, count in row.rejections.items()]
            causes += [f"lost {row.failed:,}"] if row.failed else []
            why = f" ({', '.join(causes)})" if causes else ""
            seed = f", seed {row.seed}" if len(own) > 1 else ""
            remedies = [REMEDIES[code] for code in row.rejections if code in REMEDIES]
            hint = f"; give it {', or '.join(dict.fromkeys(remedies))}" if remedies else ""
            lines.append(
                f"{label}{seed}: {row.requests - row.completed:,} of "
                f"{counted(row.requests, 'request')} had no whole answer{why}, and its other "
                f"figures are of the rest only{hint}"
            )
    return lines


def print_source_notes(console: Console, stream: JobStream) -> None:
    """Print what was assumed of a source, how many lines were left out, and the first reasons."""
    for note in stream.notes():
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    if not stream.errors.total:
        return
    console.print(
        f"[bold red]{counted(stream.errors.total, 'wrong line')} left out[/] "
        "(--strict stops at the first):"
    )
    for message in stream.errors:
        console.print(f"  {message}", highlight=False, markup=False, soft_wrap=True)
