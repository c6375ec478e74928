"""Live runs in the terminal: progress, a line a run, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from simulator.live.outcome import Outcome, ResultRow, Verdict
from simulator.report.figures import live_table, percent, ratio, whole
from simulator.report.page import Claim

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


def print_rows(console: Console, rows: Sequence[ResultRow]) -> None:
    """A table a workload, as wide as the terminal."""
    for name in dict.fromkeys(row.workload for row in rows):
        own = {row.policy: row for row in rows if row.workload == name}
        counts = sorted(row.requests for row in own.values())  # a closed loop's may differ
        requests = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        console.print(Text(f"{name}: {requests} requests, times in ms", style="bold"))
        console.print(*live_table(own)[0].in_terminal(console.width))


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """The claims, each marked."""
    return [
        f"[green]shown[/]      {claim.text}" if claim.holds else f"[red]not shown[/]  {claim.text}"
        for claim in claims
    ]
