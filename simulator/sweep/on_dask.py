"""Runs on a Dask cluster, when one machine is not enough (https://distributed.dask.org).

Its workers need this package in the same version, and the files that set-ups name under the same
names. A run whose worker is lost goes to another one, as often as the scheduler allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, Self

from simulator.sweep.errors import SweepError
from simulator.sweep.local import Answer, answer
from simulator.sweep.task import Evaluate, Outcome, Task

CONNECT_S = 10.0
AHEAD = 2  # runs handed out for each core, so that no core waits for the next


class DaskCluster:
    """A cluster by the address of its scheduler. Lifetime: the `with` block."""

    def __init__(self, address: str, evaluate: Evaluate) -> None:
        """Connects. Raises `SweepError` when nobody answers or no worker could run anything."""
        try:
            distributed: Any = import_module("distributed")
        except ImportError as error:
            raise SweepError(["--dask needs the extra: pip install 'warmroute[dask]'"]) from error
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

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes as they come; what is under way when nobody asks on is cancelled."""
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


def _outcome(task: Task, future: Any) -> Outcome:
    if future.status == "finished":
        answered: Answer = future.result()
        return Outcome(task, *answered)
    error = future.exception() if future.status == "error" else future.status
    return Outcome(task, None, f"its worker was lost: {error}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version("warmroute")
    except PackageNotFoundError:
        return ""
