"""Shows progress in the terminal: a bar for each replay or sweep, or a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

QUIET_S = 2.0  # jobs that take no longer are not shown
LINE_EVERY_S = 10.0  # seconds between lines if the console is no terminal
ESTIMATED_FROM = 0.02  # share of a job from which on the time left is estimated
# Drawing takes milliseconds of a core that measured programs need.
REFRESHES_PER_S = 2


class Board:
    """Shows the progress of named jobs as bars, or as printed lines if the console is no terminal.

    Callers may report progress as often as they like: the board looks at the clock and draws only
    now and then. Lifetime: process.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._began_s: dict[str, float] = {}
        self._next_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def start(self, name: str) -> None:
        """Start the clock of the job `name`; it shows nothing for its first `QUIET_S` seconds."""
        self._began_s[name] = self._clock()
        self._next_s[name] = self._began_s[name] + QUIET_S

    def end(self, name: str) -> None:
        """Remove the bar of the job `name`, which has ended."""
        if name in self._bars:
            self._progress.remove_task(self._bars.pop(name))

    def passed_s(self, name: str) -> float:
        """Return the seconds since the job `name` started."""
        return self._clock() - self._began_s[name]

    def count(self, name: str, done: int, total: int | None, more: str = "") -> None:
        """Show that `done` items of the job are done, out of `total`; None: the total is
        unknown.
        """
        of = f" of {total:,}" if total else ""
        self.show(name, done / total if total else None, f"{done:,}{of}{more}")

    def show(self, name: str, share: float | None, told: str) -> None:
        """Show that `share` (0 to 1) of the job is done, with the text `told` after the bar.

        A `share` of None means that nobody knows how much is left.
        """
        if name not in self._began_s:
            self.start(name)
        now_s = self._clock()
        if now_s < self._next_s[name]:
            return
        if share and ESTIMATED_FROM <= share < 1:
            told += f", {span((now_s - self._began_s[name]) * (1 - share) / share)} left"
        if not self.console.is_terminal:
            self._next_s[name] = now_s + LINE_EVERY_S
            self.console.print(f"{name}: {told}", highlight=False)
            return
        self._next_s[name] = now_s + 1 / REFRESHES_PER_S
        if name not in self._bars:
            self._progress.start()
            self._bars[name] = self._progress.add_task(name, total=1.0, told="")
        self._progress.update(self._bars[name], completed=share or 0.0, told=told)
        self._progress.refresh()


def span(seconds: float) -> str:
    """Return a span of time as text: "42 s", "3:07 min", "2:00:15 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
