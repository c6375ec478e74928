"""Requests that no worker should take just now, asked again on every finish and tick.

Among those of one priority and standing, tenants take turns by the prompt tokens they asked for
(start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996), so that a thousand requests of one
tenant are no wait for another's first. Within a tenant, and without tenants, the oldest goes first.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.contract import Standing
from policies.facts import Arrival
from router.core.mirror import Prediction
from router.estimators.sessions import Visit

_REFUSED_MAX = 8  # of one model in one sweep
_PASSED_S = 20.0  # one that has waited for longer is not passed by younger ones any more


@dataclass(slots=True, eq=False)
class Pending:
    """A request the core has accepted and not finished. Lifetime: request."""

    arrival: Arrival
    serial: int
    draw: float
    tried: set[int] = field(default_factory=set)  # workers that failed it
    worker_id: int | None = None  # where it is dispatched
    held: bool = False
    visit: Visit | None = None  # to its session, where these are followed
    standing: Standing = "new"  # of its session, when it was last decided about
    prediction: Prediction | None = None  # of its worker's cache, where that is mirrored
    fair_start: int | None = None  # prompt tokens of its tenant that go before it (`HoldQueue`)

    def turn(self) -> tuple[int, bool, int, int]:
        """By what those who wait are ordered: sessions that have begun go before new ones."""
        return (self.arrival.priority, self.standing == "new", self.fair_start or 0, self.serial)


class HoldQueue:
    """Bounded; ordered by `Pending.turn`. Lifetime: process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: list[Pending] = []
        self._fair_ends: dict[str | None, int] = {}  # by tenant: where its next one may start

    def __len__(self) -> int:
        return len(self._queue)

    def sweep(self, now_s: float) -> Iterator[Pending]:
        """The requests to ask again: most urgent first, of each model until a few were refused.

        One that is still held when the next one is wanted counts as refused; one that has waited
        for long is not passed any more. Another model's requests must not wait behind them: its
        pool may well have room.
        """
        refused: Counter[str] = Counter()
        for pending in list(self._queue):
            model = pending.arrival.model
            if refused[model] < _REFUSED_MAX:
                yield pending
                if pending.held:
                    long = now_s - pending.arrival.now_s > _PASSED_S
                    refused[model] += _REFUSED_MAX if long else 1

    def requests(self) -> list[int]:
        """The numbers of those who wait, in the order of their turns."""
        return [pending.arrival.request_id for pending in self._queue]

    def standings(self) -> Counter[Standing]:
        """How many wait, by the standing of their session."""
        return Counter(pending.standing for pending in self._queue)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self._queue) >= self._limit

    def add(self, pending: Pending) -> None:
        """Hold a request. The queue must not be full."""
        assert not self.full, "asked to hold beyond the limit"
        pending.held = True
        if pending.fair_start is None:  # one that waits again keeps its turn
            pending.fair_start = self._start(pending.arrival)
        insort(self._queue, pending, key=Pending.turn)

    def remove(self, pending: Pending) -> None:
        """Stop holding a request (dispatched, expired, or its client left)."""
        self._queue.remove(pending)
        pending.held = False

    def _start(self, arrival: Arrival) -> int:
        if not self._queue:
            self._fair_ends.clear()
        now = min((p.fair_start or 0 for p in self._queue), default=0)
        if len(self._fair_ends) > self._limit:  # as many tenants as may wait, and those long gone
            self._fair_ends = {t: end for t, end in self._fair_ends.items() if end > now}
        start = max(now, self._fair_ends.get(arrival.tenant, 0))
        self._fair_ends[arrival.tenant] = start + max(arrival.prompt_tokens, 1)
        return start

    def expired(self, now_s: float, hold_s: float) -> list[Pending]:
        """Those that waited `hold_s` or longer."""
        return [p for p in self._queue if now_s - p.arrival.now_s >= hold_s]
