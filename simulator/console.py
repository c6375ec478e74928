"""What a person sees in the terminal: progress while runs go on, the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simulator.claims import Claim
from simulator.outcome import Outcome, Verdict
from simulator.summary import ResultRow, Spread


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
        )
        self._runs = self._progress.add_task("runs", total=runs, note="")
        self._requests = self._progress.add_task("starting", total=None, note="")
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start_run(self, label: str, requests: int) -> None:
        """Begins the requests' bar anew."""
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
        f"TTFT mean {_ms(row.ttft_ms.mean)}, p99 {_ms(row.ttft_ms.p99)} ms, "
        f"hit rate {_share(row.hit_rate_tokens)}, max/mean {_number(row.load_skew)}, "
        f"overruns {_share(row.overrun_steps_share)}"
    )


def results_table(rows: Sequence[ResultRow]) -> Table:
    """All rows, times in model milliseconds."""
    table = Table(title="Times in ms; hit rate by the workers' own counters", title_style="dim")
    table.add_column("workload")
    table.add_column("policy")
    for name in ("requests", "rejected", "lost", "max/mean", "hit rate", "TTFT mean", "p50"):
        table.add_column(name, justify="right")
    for name in ("p90", "p99", "e2e mean", "out tok/s", "overruns"):
        table.add_column(name, justify="right")
    last = rows[0].workload if rows else ""
    for row in rows:
        if row.workload != last:
            table.add_section()
            last = row.workload
        table.add_row(*row_cells(row))
    return table


def row_cells(row: ResultRow) -> list[str]:
    """The cells of one row, shared with the page."""
    return [
        row.workload,
        row.policy,
        str(row.requests),
        str(row.rejected),
        str(row.failed),
        _number(row.load_skew),
        _share(row.hit_rate_tokens),
        *_spread_cells(row.ttft_ms),
        _ms(row.e2e_ms.mean),
        f"{row.output_tokens_per_s:,.0f}",
        _share(row.overrun_steps_share),
    ]


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """The claims, each marked."""
    return [
        f"[green]shown[/]      {claim.text}" if claim.holds else f"[red]not shown[/]  {claim.text}"
        for claim in claims
    ]


def _spread_cells(spread: Spread) -> list[str]:
    return [_ms(spread.mean), _ms(spread.p50), _ms(spread.p90), _ms(spread.p99)]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
