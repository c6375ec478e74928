"""How far a replay is, for whoever waits: a bar in a terminal, plain lines anywhere else.

Nothing is shown of what ends within two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from simulator.replay.run import ReplayProgress

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
