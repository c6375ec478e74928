"""A sweep from its file to its results: what is there is kept, the rest is run, all is returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from simulator.replay.setup import Setup
from simulator.sweep.evaluate import evaluate
from simulator.sweep.local import LocalProcesses
from simulator.sweep.progress import RunsBoard, duration
from simulator.sweep.store import Store
from simulator.sweep.task import Evaluate, Keys, Outcome, Runner, Task

# Requests that one core replays in a second, where no run has told yet: on the slow side.
REQUESTS_PER_S = 3_000.0


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How a sweep is run. Lifetime: one sweep."""

    results: Path  # JSON lines; what it holds already is not run again
    jobs: int | None = None  # processes; None: one for each core
    dask: str | None = None  # address of a scheduler, instead of processes of this machine


def sweep(
    setups: Sequence[Setup],
    options: SweepOptions,
    console: Console,
    evaluate: Evaluate = evaluate,
    clock_s: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """The outcome of each set-up, in their order. Ctrl-C ends all processes; results so far stay.

    Raises `SweepError` before anything runs for files that cannot be used.
    """
    keys = Keys()
    tasks = list(dict.fromkeys(keys.task(setup) for setup in setups))
    with Store(options.results) as store:
        done = {task.key: there for task in tasks if (there := store.done(task)) is not None}
        missing = [task for task in tasks if task.key not in done]
        with runner(options, evaluate) as workers, RunsBoard(console, clock_s) as board:
            seconds = estimate_s(missing, list(done.values()), workers.jobs)
            console.print(_announcement(len(missing), len(done), workers.jobs, seconds))
            board.expect(len(missing))
            for outcome in workers.run(missing):
                store.add(outcome)
                board.note(outcome)
                done[outcome.task.key] = outcome
    return [done[task.key] for task in tasks]


def runner(options: SweepOptions, evaluate: Evaluate) -> Runner:
    """Where the runs are done."""
    if options.dask is None:
        return LocalProcesses(evaluate, options.jobs)
    from simulator.sweep.on_dask import DaskCluster

    return DaskCluster(options.dask, evaluate)


def estimate_s(tasks: Sequence[Task], done: Iterable[Outcome], jobs: int) -> float | None:
    """About how long the `tasks` take; None where neither a run nor a set-up says how big one is.

    From what runs that are done took, else from the requests that the set-ups ask for.
    """
    taken = [outcome.row.wall_s for outcome in done if outcome.row is not None]
    if taken:
        return len(tasks) * sum(taken) / len(taken) / jobs
    asked = [task.setup.workload.requests for task in tasks]
    if None in asked:
        return None
    return sum(count for count in asked if count) / REQUESTS_PER_S / jobs


def _announcement(missing: int, there: int, jobs: int, seconds: float | None) -> str:
    kept = f", {there} more are there already" if there else ""
    about = "" if seconds is None or not missing else f", about {duration(seconds)}"
    return f"{missing} runs, {jobs} at a time{about}{kept}"
