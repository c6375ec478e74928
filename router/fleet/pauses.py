"""Records the times when the router itself was stopped: its process paused or starved, or its
machine suspended. Timeouts during a pause say nothing about the workers: their answers had arrived,
but the router did not read them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

_KEPT = 64
_LEAST_S = 0.05  # a shorter one harms no probe
_HARMFUL = 0.25  # of a probe's time: with so much less it may have been in time


class Pauses:
    """The router's own pauses, found by sleeps that end late. Every loop in the event loop waits by
    `sleep`. Lifetime: process.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.total_s = 0.0
        self._clock = clock
        self._due_s = math.inf  # when the present sleep should end
        self._latest: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (end, seconds)

    async def sleep(self, wait_s: float) -> None:
        """Sleep, and note by how much the sleep was too long."""
        self._due_s = self._clock() + wait_s
        try:
            await asyncio.sleep(wait_s)
            self.note()
        finally:
            self._due_s = math.inf

    def note(self) -> None:
        """Note the end of a sleep."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s >= _LEAST_S:
            self.total_s += late_s
            self._latest.append((now_s, late_s))

    def spoiled(self, began_s: float, limit_s: float) -> bool:
        """Return whether a pause took a good part of a probe of `limit_s` that began at
        `began_s`.
        """
        longest_s = self._clock() - self._due_s  # its end may be told later in this turn
        for end_s, pause_s in self._latest:
            if end_s > began_s:
                longest_s = max(longest_s, pause_s)
        return longest_s >= _HARMFUL * limit_s
