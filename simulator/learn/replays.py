"""Replays of many coefficients at once: each on the same lessons and seeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import msgspec
from rich.console import Console

from simulator.learn.lessons import Lesson
from simulator.learn.objective import Figures, figures
from simulator.learn.search import Theta, spec_of
from simulator.sweep.local import LocalProcesses
from simulator.sweep.progress import RunsBoard
from simulator.sweep.task import Evaluate, Task


class Replays:
    """Processes that replay. Lifetime: the `with` block, which leaves none behind."""

    def __init__(self, evaluate: Evaluate, jobs: int | None, console: Console) -> None:
        self._processes = LocalProcesses(evaluate, jobs)
        self._board = RunsBoard(console, time.monotonic)
        self._block = ExitStack()
        self.jobs = self._processes.jobs
        self.done = 0

    def __enter__(self) -> Self:
        with ExitStack() as block:
            block.enter_context(self._processes)
            block.enter_context(self._board)
            self._block = block.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def expect(self, runs: int) -> None:
        """So many replays are to come in all."""
        self._board.expect(runs)

    def run(self, thetas: Sequence[Theta], lessons: Sequence[Lesson]) -> list[list[list[Figures]]]:
        """Figures by coefficients, lesson and seed. A replay that failed counts as all lost."""
        tasks = [
            Task(f"{one} {two} {three}", msgspec.structs.replace(setup, policy=spec_of(theta)))
            for one, theta in enumerate(thetas)
            for two, lesson in enumerate(lessons)
            for three, setup in enumerate(lesson.setups)
        ]
        found: dict[str, Figures] = {}
        for outcome in self._processes.run(tasks):
            self._board.note(outcome)
            self.done += 1
            found[outcome.task.key] = figures(outcome.row)
        return [
            [
                [found[f"{one} {two} {three}"] for three in range(len(lesson.setups))]
                for two, lesson in enumerate(lessons)
            ]
            for one in range(len(thetas))
        ]
