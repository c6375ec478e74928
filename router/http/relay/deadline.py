"""A moment after which something is too late, cheap to move on every event of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_passed` once its moment has passed. Lifetime: request.

    `push` only notes the new moment: the timer, when it fires, looks again and sleeps on. So a
    thousand events cost a thousand assignments and not a thousand timers.
    """

    def __init__(self, clock: Callable[[], float], on_passed: Callable[[], None]) -> None:
        self._clock = clock
        self._on_passed = on_passed
        self._loop = asyncio.get_running_loop()
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Set the moment `seconds` from now, sooner or later than before."""
        self.stop()
        self._at_s = self._clock() + seconds
        self._timer = self._loop.call_later(seconds, self._look)

    def push(self, at_s: float) -> None:
        """Move the moment to `at_s` on the clock, which must not be sooner than before."""
        self._at_s = at_s

    def stop(self) -> None:
        """Call nothing until `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        left_s = self._at_s - self._clock()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._timer = None
            self._on_passed()
