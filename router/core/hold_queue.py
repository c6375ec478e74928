"""Requests that no worker should take just now, asked again on every finish and tick."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.facts import Arrival


@dataclass(slots=True)
class Pending:
    """A request the core has accepted and not finished. Lifetime: request."""

    arrival: Arrival
    serial: int
    draw: float
    tried: set[int] = field(default_factory=set)  # workers that failed it
    worker_id: int | None = None  # where it is dispatched
    held: bool = False


class HoldQueue:
    """Bounded; most urgent priority first, then oldest. Lifetime: process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: list[Pending] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._queue))

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self._queue) >= self._limit

    def add(self, pending: Pending) -> None:
        """Hold a request. The queue must not be full."""
        assert not self.full, "asked to hold beyond the limit"
        pending.held = True
        insort(self._queue, pending, key=lambda p: (p.arrival.priority, p.serial))

    def remove(self, pending: Pending) -> None:
        """Stop holding a request (dispatched, expired, or its client left)."""
        self._queue.remove(pending)
        pending.held = False

    def expired(self, now_s: float, hold_s: float) -> list[Pending]:
        """Those that waited `hold_s` or longer."""
        return [p for p in self._queue if now_s - p.arrival.now_s >= hold_s]
