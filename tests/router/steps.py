"""An executor for tests that does a job only when the test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Steps(Executor):
    """An executor that does one job in each call of `step`."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., Any], /, *given: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(call(*given, **more))

        self._calls.append(run)
        return done

    def step(self) -> bool:
        """Do the next job; return False if there is none."""
        if not self._calls:
            return False
        self._calls.popleft()()
        return True


async def run_until_all_wait() -> None:
    """Let the event loop run until every task waits."""
    for _ in range(10):
        await asyncio.sleep(0)
