"""Requests by the time after which nobody waits for their answer."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import isfinite

from engine.request import Request, State

SLACK = 64  # finished requests that may linger among as many unfinished ones


class Deadlines:
    """A heap of deadlines; lifetime: worker. Costs nothing for requests that have none."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0

    def add(self, request: Request, unfinished: int) -> None:
        """Watch `request`, if it has a deadline; so many requests are unfinished.

        Requests that end otherwise need not be told: they are dropped once they outnumber these.
        """
        if not isfinite(request.deadline_s):
            return
        self._serial += 1
        heappush(self._heap, (request.deadline_s, self._serial, request))
        if len(self._heap) > 2 * unfinished + SLACK:
            self._heap = [one for one in self._heap if one[2].state is not State.FINISHED]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """When the next one passes; None: none is watched."""
        heap = self._heap
        while heap and heap[0][2].state is State.FINISHED:
            heappop(heap)
        return heap[0][0] if heap else None

    def passed(self, now_s: float) -> list[Request]:
        """Unfinished requests whose deadline is `now_s` or was before; told once."""
        late: list[Request] = []
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            request = heappop(heap)[2]
            if request.state is not State.FINISHED:
                late.append(request)
        return late
