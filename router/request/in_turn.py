"""Runs parts of requests in threads, so that earlier requests come first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from itertools import count
from queue import PriorityQueue
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def let_others_run() -> Generator[None]:
    """Return control to the event loop once, so that other requests can run before this one
    continues.
    """
    yield


class _Job:
    """One function call for a request, which a thread will run. Lifetime: job."""

    __slots__ = ("result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Future[Any] = Future()

    def run(self) -> None:
        """Call the function, unless the request has ended."""
        work = self.work
        if work is None or not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again in `InTurn.run`
            self.result.set_exception(error)
            del self, work  # which the error's traceback would keep, in a ring with the error


class InTurn:
    """Runs jobs in the threads of `executor`; the next job is always one of the earliest request
    that has any. Lifetime: process.

    So a request that needs several jobs, one after the other, never waits for requests that came
    after it, except for their jobs that are already running.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: PriorityQueue[tuple[int, int, _Job]] = PriorityQueue()
        self._jobs = count()

    async def run(self, turn: int, work: Callable[[], T]) -> T:
        """Call `work` in a thread, and return its result or raise its error.

        `turn` is the number of the request; smaller numbers came earlier. If this is cancelled
        before `work` has begun, `work` and all that it refers to is dropped.
        """
        job = _Job(work)
        self._waiting.put((turn, next(self._jobs), job))
        self._executor.submit(self._run_next)  # one call for each job, whichever job it then takes
        try:
            result: T = await asyncio.wrap_future(job.result)
            return result
        finally:
            job.work = None
            del job, work  # as above

    def _run_next(self) -> None:
        self._waiting.get_nowait()[-1].run()
