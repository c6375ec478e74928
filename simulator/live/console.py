"""Shows live runs in the terminal: progress bars, one line for each run, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from simulator.live.outcome import LiveVerdict, Outcome, ResultRow
from simulator.report.board import Board
from simulator.report.figures import live_table, percent, ratio, whole
from simulator.report.page import Claim


class LoadBoard(Board):
    """A progress display: how many live runs, and how many requests of the current run, are done.
    Lifetime: process.
    """

    def __init__(self, console: Console, runs: int) -> None:
        super().__init__(console)
        self._runs = runs
        self._run = ""
        self._ended = self._sent = self._failed = 0
        self._requests: int | None = None

    def start_run(self, label: str, requests: int | None) -> None:
        """Start to count the requests of a new run. `requests` is None if their number is not
        known.
        """
        self.end(self._run)
        self._run, self._requests, self._sent, self._failed = label, requests, 0, 0
        self.start(label)

    def note(self, outcome: Outcome) -> None:
        """Count one request. The error of the first lost request is printed at once."""
        self._sent += 1
        if outcome.verdict is LiveVerdict.FAILED:
            self._failed += 1
            if self._failed == 1:
                self.console.print(f"[bold red]lost[/] request {outcome.serial}: {outcome.error}")
        lost = f", {self._failed} lost" if self._failed else ""
        self.count(self._run, self._sent, self._requests, lost)

    def end_run(self, line: str) -> None:
        """Count one run, and print a line about it."""
        self.console.print(line)
        self._ended += 1
        self.count("runs", self._ended, self._runs)


def run_line(row: ResultRow) -> str:
    """Return one line with the main results of a live run."""
    return (
        f"{row.workload} / {row.policy}: {row.completed} of {row.requests} completed, "
        f"TTFT mean {whole(row.ttft_ms.mean)}, p99 {whole(row.ttft_ms.p99)} ms, "
        f"hit rate {percent(row.hit_rate_tokens)}, max/mean {ratio(row.load_skew)}, "
        f"overruns {percent(row.overrun_steps_share)}"
    )


def print_rows(console: Console, rows: Sequence[ResultRow]) -> None:
    """Print the results of live runs, one table for each workload, as wide as the terminal."""
    for name in dict.fromkeys(row.workload for row in rows):
        own = {row.policy: row for row in rows if row.workload == name}
        counts = sorted(row.requests for row in own.values())  # a closed loop's may differ
        requests = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        console.print(Text(f"{name}: {requests} requests, times in ms", style="bold"))
        console.print(*live_table(own)[0].in_terminal(console.width))


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """Return one line for each claim of the demo, marked as shown or not shown."""
    return [
        f"[green]shown[/]      {claim.text}" if claim.holds else f"[red]not shown[/]  {claim.text}"
        for claim in claims
    ]
