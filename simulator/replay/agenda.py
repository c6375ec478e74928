"""The agenda of a replay: a heap of future actions, ordered by time in integer nanoseconds, then by
rank, then by serial number.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_RANK_SHIFT = 48  # serials below: more than any replay schedules


class Rank:
    """The order of actions at one instant: ends come before beginnings.

    First, steps of workers end. Then the router receives their answers, then their KV events, in
    the order in which an engine sends them. Then workers join and leave, then the core gets its
    ticks, and new requests arrive last, so that a decision knows everything that happened at its
    instant. The ranks are plain numbers, because looking up the members of an enumeration would
    cost as much as the heap.
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
    """The virtual clock of a replay and its planned actions.

    Lifetime: replay. Actions of the same time and rank happen in the order in which they were
    planned. Ends of steps are ordered by the worker's number instead, because a worker may be woken
    any number of times in between.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.over = False  # set when nothing is left to do
        self._heap: list[tuple[int, int, Callable[[int, Any], None], Any]] = []
        self._serial = 0

    def at(self, time_ns: int, rank: int, do: Callable[[int, Any], None], what: Any) -> None:
        """Plan the call `do(time_ns, what)` for `time_ns`, which must not be before now."""
        self._serial += 1
        heappush(self._heap, (time_ns, rank << _RANK_SHIFT | self._serial, do, what))

    def wake(self, time_ns: int, number: int, do: Callable[[int, Any], None], what: Any) -> None:
        """Plan the end of a step of the worker `number`. The same end may be planned twice."""
        heappush(self._heap, (time_ns, number, do, what))

    def run(self) -> None:
        """Run the planned actions in order, until `over` is set or none is left."""
        heap = self._heap
        while heap and not self.over:
            time_ns, _, do, what = heappop(heap)
            self.now_ns = time_ns
            do(time_ns, what)
