"""How far many runs are: a bar where somebody watches, plain lines now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simulator.sweep.task import Outcome

LINE_EVERY_S = 10.0
REFRESHES_PER_S = 2


class RunsBoard:
    """Counts runs, and shows each that failed. Lifetime: one sweep."""

    def __init__(self, console: Console, clock_s: Callable[[], float]) -> None:
        self.console = console
        self.failed = 0
        self._clock_s = clock_s
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("runs", total=None)
        self._total: int | None = None
        self._done = 0
        self._began_s = self._told_s = clock_s()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, runs: int) -> None:
        """So many runs are to come in all: only then can anybody say how long they take."""
        self._total = runs
        self._bar.update(self._task, total=runs)

    def note(self, outcome: Outcome) -> None:
        """Counts one run."""
        self._done += 1
        self._bar.advance(self._task)
        if outcome.error is not None:
            self.failed += 1
            setup = outcome.task.setup
            where = escape(f"{setup.policy}, seed {setup.seed}: {outcome.error}")
            self.console.print(f"[bold red]failed[/] {where}", highlight=False)
        now_s = self._clock_s()
        if not self.console.is_terminal and now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            self.console.print(self._line(now_s - self._began_s), highlight=False)

    def _line(self, spent_s: float) -> str:
        if self._total is None:
            return f"{self._done} runs done"
        left_s = spent_s / self._done * (self._total - self._done)
        return f"{self._done} of {self._total} runs, about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """A length of time as one says it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
