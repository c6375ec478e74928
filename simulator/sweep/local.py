"""Runs on this machine, in processes that are spawned, watched, and replaced when they die.

The processes of `concurrent.futures` fail together when one is killed, and nobody can tell whose
run did it. Here each has its own pipe, so that only the run of the dead one is tried again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from threading import Thread
from typing import Self

from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.sweep.task import Evaluate, Outcome, Task

MAX_ATTEMPTS = 2  # of a run whose process died; a run that raises would raise again
# One process a core is enough: libraries that start threads of their own would only get in the way.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

LAST_BREATH_S = 5.0  # from a closed pipe to the end of its process

Answer = tuple[ReplayRow | None, str | None]


class LocalProcesses:
    """Spawned processes that run tasks. Lifetime: the `with` block, which leaves none behind."""

    def __init__(self, evaluate: Evaluate, jobs: int | None = None) -> None:
        self.jobs = jobs or cores()
        self._evaluate = evaluate
        self._children: list[_Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()
        self._children.clear()

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes as they come. A run that raises has failed; one whose process dies is
        tried once more.
        """
        waiting = deque((task, 1) for task in tasks)
        while True:
            for child in self._free(len(waiting)):
                child.give(*waiting.popleft())
            busy = {child.pipe: child for child in self._children if child.task is not None}
            if not busy:
                return
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, connection.Connection)
                child = busy[pipe]
                outcome = child.take()
                if outcome.row is None and outcome.error is None:
                    self._children.remove(child)
                    outcome = _died(outcome, child.how_it_ended())
                    if outcome.attempts < MAX_ATTEMPTS:
                        waiting.appendleft((outcome.task, outcome.attempts + 1))
                        continue
                yield outcome

    def _free(self, wanted: int) -> list[_Child]:
        """At most `wanted` processes without a task; started where there are too few."""
        free = [child for child in self._children if child.task is None][:wanted]
        while len(free) < wanted and len(self._children) < self.jobs:
            child = _Child(self._evaluate)
            self._children.append(child)
            free.append(child)
        return free


class _Child:
    """One process and the task it is at. Lifetime: process."""

    def __init__(self, evaluate: Evaluate) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.task: Task | None = None
        self._attempts = 0
        self._process = spawn.Process(target=work, args=(theirs,), daemon=True)
        # Ctrl-C in a terminal goes to all processes: ours ends the others. Blocked while it
        # starts, which it inherits, a child never sees it; here it comes a moment later.
        resource_tracker.ensure_running()  # it unblocks the signal when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._send(evaluate)

    def give(self, task: Task, attempt: int) -> None:
        self.task, self._attempts = task, attempt
        self._send(task.setup)

    def take(self) -> Outcome:
        """What came of the task; neither row nor error: the process died."""
        assert self.task is not None
        task, self.task = self.task, None
        try:
            row, error = self.pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            row = error = None
        return Outcome(task, row, error, self._attempts)

    def end(self) -> None:
        """Ends it, whatever it is at; a run leaves nothing behind."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()

    def how_it_ended(self) -> str:
        """In words, of one whose pipe has closed; then nothing is left of it."""
        self._process.join(LAST_BREATH_S)
        code = self._process.exitcode
        self.end()
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def _send(self, what: object) -> None:
        # Dead already? Reading from it says so to whoever waits for its answer.
        with suppress(BrokenPipeError):
            self.pipe.send(what)


def work(pipe: connection.Connection) -> None:
    """A child's life: a function, then set-ups, each answered by (row, None) or (None, error)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        evaluate: Evaluate = pipe.recv()
        while True:
            pipe.send(answer(evaluate, pipe.recv()))
    except (EOFError, BrokenPipeError):
        return


def answer(evaluate: Evaluate, setup: Setup) -> Answer:
    """The row, or in words why there is none."""
    try:
        return evaluate(setup), None
    except Exception as error:  # noqa: BLE001 - told to the person; the other runs go on
        return None, f"{type(error).__name__}: {error}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children: they see it gone and end themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _died(outcome: Outcome, how: str) -> Outcome:
    hint = "; too little memory?" if how.endswith("SIGKILL") else ""
    error = f"its process {how}, {outcome.attempts} times{hint}"
    return Outcome(outcome.task, None, error, outcome.attempts)
