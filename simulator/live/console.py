"""Live runs in the terminal: progress, a line a run, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simulator.live.outcome import Outcome, ResultRow, Verdict
from simulator.report.figures import percent, ratio, whole
from simulator.report.live_page import Claim

COLUMNS = ("rej.", "lost", "max/avg", "hits", "TTFT", "p99", "e2e", "overrun")
# Drawing takes milliseconds of a core that the measured programs need.
REFRESHES_PER_S = 2


class Board:
    """A progress bar for the runs and one for the requests of this run. Lifetime: process."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
        )
        self._runs = self._progress.add_task("runs", total=runs, note="")
        self._requests = self._progress.add_task("starting", total=None, note="")
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start_run(self, label: str, requests: int | None) -> None:
        """Begins the requests' bar anew; None: nobody knows how many they will be."""
        self._failed = 0
        self._progress.reset(self._requests, total=requests, description=label, note="")

    def note(self, outcome: Outcome) -> None:
        """Counts one request; a lost one is shown at once, and its error the first time."""
        if outcome.verdict is Verdict.FAILED:
            self._failed += 1
            if self._failed == 1:
                self.console.print(f"[bold red]lost[/] request {outcome.serial}: {outcome.error}")
            self._progress.update(self._requests, note=f"[bold red]{self._failed} lost[/]")
        self._progress.advance(self._requests)

    def end_run(self, line: str) -> None:
        """Counts one run and leaves a line about it."""
        self.console.print(line)
        self._progress.advance(self._runs)


def run_line(row: ResultRow) -> str:
    """One run in one line."""
    return (
        f"{row.workload} / {row.policy}: {row.completed} of {row.requests} completed, "
        f"TTFT mean {whole(row.ttft_ms.mean)}, p99 {whole(row.ttft_ms.p99)} ms, "
        f"hit rate {percent(row.hit_rate_tokens)}, max/mean {ratio(row.load_skew)}, "
        f"overruns {percent(row.overrun_steps_share)}"
    )


def results_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """One table a workload, narrow enough for 80 columns."""
    workloads = dict.fromkeys(row.workload for row in rows)
    return [_table([row for row in rows if row.workload == name]) for name in workloads]


def _table(rows: Sequence[ResultRow]) -> Table:
    counts = [row.requests for row in rows]  # a closed loop's depend on the answers
    requests = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    title = f"{rows[0].workload}: {requests} requests, times in ms"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ttft, e2e = row.ttft_ms, row.e2e_ms
        times = [whole(value) for value in (ttft.mean, ttft.p99, e2e.mean)]
        table.add_row(
            row.policy,
            str(row.rejected),
            str(row.failed),
            ratio(row.load_skew),
            percent(row.hit_rate_tokens),
            *times,
            percent(row.overrun_steps_share),
        )
    return table


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """The claims, each marked."""
    return [
        f"[green]shown[/]      {claim.text}" if claim.holds else f"[red]not shown[/]  {claim.text}"
        for claim in claims
    ]
