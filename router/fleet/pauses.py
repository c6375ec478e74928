"""Records pauses of the router itself: its process was stopped or got no CPU time, or its machine
was suspended.

A timeout during a pause says nothing about a worker, whose answer had arrived but was not read.
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
    """The pauses of the router's own process, found by sleeps that end late. All loops of the event
    loop wait by `sleep`. Lifetime: process.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.total_s = 0.0
        self._clock = clock
        self._due_s = math.inf  # when the present sleep should end
        self._latest: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (end, seconds)

    async def sleep(self, wait_s: float) -> None:
        """Sleep for `wait_s` seconds, and record a pause if the sleep ended too late."""
        self._due_s = self._clock() + wait_s
        try:
            await asyncio.sleep(wait_s)
            self.note()
        finally:
            self._due_s = math.inf

    def note(self) -> None:
        """Record a pause if the present sleep ended too late."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s >= _LEAST_S:
            self.total_s += late_s
            self._latest.append((now_s, late_s))

    def overlaps_probe(self, began_s: float, limit_s: float) -> bool:
        """Return whether the router was paused for at least a quarter of the time limit `limit_s`
        of a probe that began at `began_s`.
        """
        longest_s = self._clock() - self._due_s  # its end may be told later in this turn
        for end_s, pause_s in self._latest:
            if end_s > began_s:
                longest_s = max(longest_s, pause_s)
        return longest_s >= _HARMFUL * limit_s
