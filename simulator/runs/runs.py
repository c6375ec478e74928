"""Runs each set-up once; results that the file of results has already are taken from it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape

from simulator.replay.setup import Setup
from simulator.report.board import Board, span
from simulator.report.row import ReplayRow, summarize
from simulator.runs.executor import DaskCluster, LocalProcesses
from simulator.runs.store import Store
from simulator.runs.task import Evaluate, Keys, Runner, RunOutcome, Task


def evaluate(setup: Setup) -> ReplayRow:
    """Return the figures of one replay.

    Raises what the replay raises for a set-up that cannot run.
    """
    # Imported where it runs: a process that only sends this function needs no replay.
    from simulator.replay.run import replay

    return summarize(replay(setup))


MAX_REQUEST_FILES = 1_000
MAX_REQUEST_LINES = 2_000_000  # of all files together: some 2 GB


class RequestFiles:
    """Evaluates set-ups and writes the requests of each run to a file of its own.

    It is sent to other processes together with its sweep's keys. A file gets its final name once it
    is whole. Lifetime: a sweep.
    """

    def __init__(self, folder: Path, keys: Keys, most_lines: int) -> None:
        self.folder, self.keys, self.most_lines = folder, keys, most_lines

    def path(self, task: Task) -> Path:
        """Return the path of the file with a run's requests, such as
        `warmset-seed1-0123456789abcdef0123.csv`.
        """
        policy = re.sub(r"[^A-Za-z0-9_.=-]+", "_", task.setup.policy)[:60]
        return self.folder / f"{policy}-seed{task.setup.seed}-{task.key}.csv"

    def __call__(self, setup: Setup) -> ReplayRow:
        """Return the figures of one replay. Raises the errors of the replay."""
        from simulator.replay.run import replay
        from simulator.report.files import RequestsCsv

        path = self.path(self.keys.task(setup))
        part = path.with_suffix(".part")
        try:
            with part.open("w", encoding="utf-8", newline="") as file:
                writer = RequestsCsv(file, most_lines=self.most_lines)
                row = summarize(replay(setup, observers=[writer]))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return row


# A low estimate of the requests that one core replays per second, before the first run.
REQUESTS_PER_S = 3_000.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Settings of where runs are done and where results are kept. Lifetime: one sweep or plan."""

    results: Path | None = None  # JSON lines; what it holds already is not run again
    jobs: int | None = None  # processes; None: one for each core
    dask: str | None = None  # address of a scheduler, instead of processes of this machine
    requests: Path | None = None  # a folder for a file of each run's requests
    request_lines: int = MAX_REQUEST_LINES  # of each such file


class RunResults:
    """Runs set-ups and keeps their results. Entering the `with` block raises `SweepError` for a
    file or a cluster that cannot be used. Lifetime: the `with` block, which leaves no process
    behind.
    """

    def __init__(
        self,
        options: RunOptions,
        console: Console,
        evaluate: Evaluate = evaluate,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._console, self._evaluate = options, console, evaluate
        self._clock_s = clock_s
        self._keys = Keys()
        self.files: RequestFiles | None = None
        if options.requests is not None:
            self.files = RequestFiles(options.requests, self._keys, options.request_lines)
            self._evaluate = self.files
        self._done: dict[str, RunOutcome] = {}
        self._block = ExitStack()
        self._store: Store | None = None
        self._ended = 0
        self._expected: int | None = None  # number of announced runs; None: unknown

    def __enter__(self) -> Self:
        options = self._options
        with ExitStack() as block:
            if options.results is not None:
                self._store = block.enter_context(Store(options.results))
            self._runner = self._new_runner()
            block.enter_context(self._runner)
            self._board = block.enter_context(Board(self._console, self._clock_s))
            self._block = block.pop_all()
        return self

    def _new_runner(self) -> Runner:
        if self._options.dask is None:
            return LocalProcesses(self._evaluate, self._options.jobs)
        return DaskCluster(self._options.dask, self._evaluate)

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def outcomes(self, setups: Sequence[Setup]) -> list[RunOutcome]:
        """Return the outcome of each set-up, in their order; a failed run has an outcome as well.

        Raises `SweepError` for a file that a set-up names and that cannot be read.
        """
        tasks = [self._keys.task(setup) for setup in setups]
        missing = self.missing(tasks)
        for outcome in self._runner.run(missing):
            if self._store is not None:
                self._store.add(outcome)
            self._note(outcome)
            self._done[outcome.task.key] = outcome
        return [self._done[task.key] for task in tasks]

    def _note(self, outcome: RunOutcome) -> None:
        """Count a run that has ended, and print a line at once if it failed."""
        self._ended += 1
        if outcome.error is not None:
            setup = outcome.task.setup
            where = escape(f"{setup.policy}, seed {setup.seed}: {outcome.error}")
            self._console.print(f"[bold red]failed[/] {where}", highlight=False)
        self._board.count("runs", self._ended, self._expected)

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that have no outcome yet, each once."""
        for task in tasks:
            if self.files is not None and not self.files.path(task).exists():
                continue
            if task.key not in self._done and self._store is not None:
                there = self._store.done(task)
                if there is not None:
                    self._done[task.key] = there
        return list({task.key: task for task in tasks if task.key not in self._done}.values())

    def announce(self, setups: Sequence[Setup]) -> None:
        """Print how many runs `setups` take and about how long; no other runs follow."""
        tasks = [self._keys.task(setup) for setup in setups]
        missing = self.missing(tasks)
        self._expected = len(missing)
        jobs = self._runner.jobs
        about_s = estimate_s(missing, list(self._done.values()), jobs)
        about = "" if about_s is None or not missing else f", about {span(max(1.0, about_s))}"
        there = len({task.key for task in tasks}) - len(missing)
        kept = f"; {there} more are there already" if there else ""
        line = f"{len(missing)} runs, {jobs} at a time{about}{kept}"
        self._console.print(line, highlight=False)


def estimate_s(tasks: Sequence[Task], done: Iterable[RunOutcome], jobs: int) -> float | None:
    """Return about how many seconds the `tasks` take. The estimate comes from the runs that are
    done, else from the number of requests of each set-up; None if neither is known.
    """
    taken: list[float] = [outcome.row.wall_s for outcome in done if outcome.row is not None]
    if taken:
        return len(tasks) * sum(taken) / len(taken) / jobs
    asked = [task.setup.workload.requests for task in tasks]
    if None in asked:
        return None
    return sum(count for count in asked if count) / REQUESTS_PER_S / jobs


def sweep(
    setups: Sequence[Setup],
    options: RunOptions,
    console: Console,
    evaluate: Evaluate = evaluate,
) -> list[RunOutcome]:
    """Run the set-ups and return their outcomes in order; a failed run has an outcome as well.

    Prints the number of runs before it starts. Ctrl-C ends all processes; the file of results keeps
    what is done. Raises `SweepError` before anything runs for files that cannot be used.
    """
    with RunResults(options, console, evaluate) as runs:
        runs.announce(setups)
        outcomes = runs.outcomes(setups)
    if runs.files is not None:
        console.print(_written(runs.files, outcomes), highlight=False, markup=False, soft_wrap=True)
    return outcomes


def _written(files: RequestFiles, outcomes: Sequence[RunOutcome]) -> str:
    """Return a sentence on the files of requests, and on how many of them end at the limit of
    lines.
    """
    sizes = [outcome.row.requests for outcome in outcomes if outcome.row is not None]
    cut = sum(size > files.most_lines for size in sizes)
    told = f"{files.folder}: a file of requests for each of {len(sizes)} runs"
    return f"{told}; {cut} have only the first {files.most_lines:,} to end" if cut else told
