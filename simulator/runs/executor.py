"""Executors of replays: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from multiprocessing import connection, resource_tracker
from threading import Thread
from typing import Any, Self

from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.runs.task import Evaluate, RunOutcome, SweepError, Task

ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
MAX_ATTEMPTS = 2  # of a run whose process died; a run that raises would raise again
# One process a core is enough: libraries that start threads of their own would only get in the way.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

LAST_BREATH_S = 5.0  # from a closed pipe to the end of its process

Answer = tuple[ReplayRow | None, str | None]


class LocalProcesses:
    """Child processes that run tasks. Lifetime: the `with` block, which leaves no process
    behind.
    """

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

    def run(self, tasks: Sequence[Task]) -> Iterator[RunOutcome]:
        """Yield the outcome of each run when it ends. A run that raises an error has failed; a run
        whose process dies is tried once more.
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
        """Return at most `wanted` processes without a task; new ones are started if there are too
        few.
        """
        free = [child for child in self._children if child.task is None][:wanted]
        while len(free) < wanted and len(self._children) < self.jobs:
            child = _Child(self._evaluate)
            self._children.append(child)
            free.append(child)
        return free


class _Child:
    """One child process and the task that it works on. Lifetime: process."""

    def __init__(self, evaluate: Evaluate) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.task: Task | None = None
        self._attempts = 0
        self._process = spawn.Process(target=work, args=(theirs,), daemon=True)
        # Ctrl-C in a terminal goes to all processes: ours ends the others. Blocked while it
        # starts, which it inherits, a child never sees it; here it comes a moment later.
        resource_tracker.ensure_running()  # it unblocks the signal when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        try:
            self._process.start()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._send(evaluate)

    def give(self, task: Task, attempt: int) -> None:
        self.task, self._attempts = task, attempt
        self._send(task.setup)

    def take(self) -> RunOutcome:
        """Return the outcome of the child's task. If the process died, the outcome has neither row
        nor error.
        """
        assert self.task is not None
        task, self.task = self.task, None
        try:
            row, error = self.pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            row = error = None
        return RunOutcome(task, row, error, self._attempts)

    def end(self) -> None:
        """Kill the child process, whatever it does, and free its resources."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()

    def how_it_ended(self) -> str:
        """Return in words how a process ended whose pipe has closed, and free its resources."""
        self._process.join(LAST_BREATH_S)
        code = self._process.exitcode
        self.end()
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def _send(self, what: object) -> None:
        # If the process is dead, the next read from its pipe reports that.
        with suppress(BrokenPipeError):
            self.pipe.send(what)


def _end_with_parent() -> None:
    """Wait until the parent process has gone, then end this process.

    A parent that was killed cannot end its children.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work(pipe: connection.Connection) -> None:
    """Run a child process: receive a function, then set-ups, and send an answer to each set-up. An
    answer is (row, None) or (None, error).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
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
    """Return the row of the set-up and None, or None and the error as text."""
    try:
        return evaluate(setup), None
    except Exception as error:  # noqa: BLE001 - told to the person; the other runs go on
        return None, f"{type(error).__name__}: {error}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _died(outcome: RunOutcome, how: str) -> RunOutcome:
    hint = "; too little memory?" if how.endswith("SIGKILL") else ""
    error = f"its process {how}, {outcome.attempts} times{hint}"
    return RunOutcome(outcome.task, None, error, outcome.attempts)


CONNECT_S = 10.0
DASK_MISSING = (
    "--dask: distributed is not installed: pip install 'distributed>=2026.8' "
    "(or '.[dask]' in the checkout)"
)
AHEAD = 2  # runs handed out for each core, so that no core waits for the next


class DaskCluster:
    """A Dask cluster, reached by the address of its scheduler. Lifetime: the `with` block."""

    def __init__(self, address: str, evaluate: Evaluate) -> None:
        """Connect to the scheduler.

        Raises `SweepError` if nothing answers or no worker could run anything.
        """
        try:
            distributed: Any = import_module("distributed")
        except ImportError as error:
            raise SweepError([DASK_MISSING]) from error
        try:
            self._client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise SweepError([f"--dask {address}: no scheduler answers there: {error}"]) from error
        self._as_completed = partial(distributed.as_completed, loop=self._client.loop)
        self._evaluate = evaluate
        try:
            self._check(address)
        except BaseException:
            self._client.close()
            raise
        self.jobs = max(1, sum(self._client.nthreads().values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, tasks: Sequence[Task]) -> Iterator[RunOutcome]:
        """Yield the outcome of each run when it ends; if the caller stops early, runs in progress
        are cancelled.
        """
        waiting = iter(tasks)
        pending: dict[Any, Task] = {}
        ended = self._as_completed()
        try:
            for task in waiting:
                self._submit(task, pending, ended)
                if len(pending) >= AHEAD * self.jobs:
                    break
            while pending:
                future = next(ended)
                yield _outcome(pending.pop(future), future)
                future.release()
                for task in waiting:
                    self._submit(task, pending, ended)
                    break
        finally:
            if pending:
                self._client.cancel(list(pending))

    def _submit(self, task: Task, pending: dict[Any, Task], ended: Any) -> None:
        future = self._client.submit(answer, self._evaluate, task.setup, pure=False)
        pending[future] = task
        ended.add(future)

    def _check(self, address: str) -> None:
        ours = version("warmroute")
        theirs = self._client.run(_version)
        if not theirs:
            raise SweepError([f"--dask {address}: the scheduler has no workers; start some"])
        for worker, found in theirs.items():
            if found != ours:
                has = f"warmroute {found}" if found else "no warmroute"
                raise SweepError([f"--dask {address}: {worker} has {has}, here is {ours}"])


def _outcome(task: Task, future: Any) -> RunOutcome:
    if future.status == "finished":
        answered: Answer = future.result()
        return RunOutcome(task, *answered)
    error = future.exception() if future.status == "error" else future.status
    return RunOutcome(task, None, f"its worker was lost: {error}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version("warmroute")
    except PackageNotFoundError:
        return ""
