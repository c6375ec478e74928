"""The last decisions, for people who ask why."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.facts import Arrival
from router.core.actions import Decision, Dispatch

_KEPT = 1_000


@dataclass(frozen=True, slots=True)
class Record:
    """One dispatch. No text, no chain."""

    now_s: float
    request_id: int
    model: str
    session: str | None
    worker_id: int
    decision: Decision


class DecisionLog:
    """The last 1,000 dispatches, newest first when read. Lifetime: process."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=_KEPT)

    def add(self, arrival: Arrival, action: Dispatch) -> None:
        """Remember a dispatch: its best workers, and not what each of the pool would cost."""
        _ = action.decision.candidates
        self._records.appendleft(
            Record(
                arrival.now_s,
                arrival.request_id,
                arrival.model,
                arrival.session,
                action.worker_id,
                action.decision,
            )
        )

    def latest(self, count: int) -> list[Record]:
        """At most `count`, newest first."""
        return [record for record, _ in zip(self._records, range(count), strict=False)]
