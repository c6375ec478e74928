"""What happens next: a heap of (time, rank, serial), in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_RANK_SHIFT = 48  # serials below: more than any replay schedules


class Rank:
    """Who goes first at one instant: what ends before what begins.

    Steps end and their news travels; the router takes it in, answers first, as a reply and the
    events of the same step leave the engine in this order; then the pool changes, time is told,
    and new work comes in, so that a decision knows all that was to be known at its instant.
    Plain numbers: looking up an enumeration's members would cost as much as the heap.
    """

    STEP = 0  # something visible ended in a worker
    ANSWER = 1  # tokens, errors, broken connections reach the router
    EVENTS = 2  # a batch of KV events, or a replay of some, reaches the router
    REPORT = 3  # a load report is taken, or reaches the router
    FAULT = 4  # the timeline
    HEALTH = 5  # a probe tells the router that a worker is down or back
    TICK = 6
    SEND = 7  # a dispatched request reaches its worker
    ARRIVAL = 8
    SAMPLE = 9


class Agenda:
    """Virtual time. Lifetime: replay.

    Within a time and a rank things happen in the order they were planned. Ends of steps go by
    the worker's number instead: how often a worker is woken in between is its own business.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.over = False  # set by whoever sees that nothing is left to do
        self._heap: list[tuple[int, int, Callable[[int, Any], None], Any]] = []
        self._serial = 0

    def at(self, time_ns: int, rank: int, do: Callable[[int, Any], None], what: Any) -> None:
        """Plan `do(time_ns, what)`. `time_ns` is not before now."""
        self._serial += 1
        heappush(self._heap, (time_ns, rank << _RANK_SHIFT | self._serial, do, what))

    def wake(self, time_ns: int, number: int, do: Callable[[int, Any], None], what: Any) -> None:
        """Plan the end of a step of worker `number`; the same one may be planned twice."""
        heappush(self._heap, (time_ns, number, do, what))

    def run(self) -> None:
        """Let everything happen, until `over` is set or nothing is planned."""
        heap = self._heap
        while heap and not self.over:
            time_ns, _, do, what = heappop(heap)
            self.now_ns = time_ns
            do(time_ns, what)
