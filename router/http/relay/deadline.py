"""A moment after which something is too late, cheap to move on every event of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls back once its moment has passed. Lifetime: request.

    `push` only notes the new moment: the timer, when it fires, looks again and sleeps on. So a
    thousand events cost a thousand assignments and not a thousand timers. Only the timer holds
    the callback, so that a deadline at rest ties no knot for the garbage collector.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, on_passed: Callable[[], None]) -> None:
        """Set the moment `seconds` from now, sooner or later than before."""
        self.stop()
        self._at_s = self._clock() + seconds
        self._arm(seconds, on_passed)

    def push(self, at_s: float) -> None:
        """Move the moment to `at_s` on the clock, which must not be sooner than before."""
        self._at_s = at_s

    def stop(self) -> None:
        """Call nothing until `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, seconds: float, on_passed: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look, on_passed)

    def _look(self, on_passed: Callable[[], None]) -> None:
        left_s = self._at_s - self._clock()
        if left_s > 0:
            self._arm(left_s, on_passed)
        else:
            self._timer = None
            on_passed()
