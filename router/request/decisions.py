"""The last decisions, for operators who ask why."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.facts import Arrival
from router.core.actions import Decision, Dispatch, regret_hit_tokens, regret_s
from router.upstream.reply import Outcome

_KEPT = 1_000
_WEIGHED = 64  # workers, whose costs take half a kilobyte a decision


@dataclass(slots=True)
class Record:
    """One dispatch and what came of it. No text, no chain. Lifetime: until 1,000 others came."""

    now_s: float  # its arrival
    sent_s: float
    request_id: int
    model: str
    session: str | None
    tenant: str | None
    worker_id: int
    decision: Decision
    first_token_s: float | None = None  # from dispatch; None: not yet, or not to be told
    cached_tokens: int | None = None  # of the prompt, as the worker reported

    def ended(self, arrival: Arrival, outcome: Outcome) -> None:
        """The answer is complete, or there is none."""
        if arrival.stream and outcome.answers and outcome.first_byte_s is not None:
            self.first_token_s = max(outcome.first_byte_s - self.sent_s, 0.0)
        if outcome.usage is not None:
            self.cached_tokens = outcome.usage.cached_tokens

    @property
    def regret_s(self) -> float | None:
        """See `router.core.actions`."""
        return regret_s(self.decision, self.first_token_s)

    @property
    def regret_hit_tokens(self) -> int | None:
        """See `router.core.actions`."""
        return regret_hit_tokens(self.decision, self.cached_tokens)


class DecisionLog:
    """The last 1,000 dispatches, newest first when read. Lifetime: process."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=_KEPT)
        self.added = 0  # ever

    def add(self, arrival: Arrival, action: Dispatch, sent_s: float) -> Record:
        """Remember a dispatch. Of a large pool only its best workers are kept, not all costs."""
        action.decision.trim(_WEIGHED)
        record = Record(
            arrival.now_s,
            sent_s,
            arrival.request_id,
            arrival.model,
            arrival.session,
            arrival.tenant,
            action.worker_id,
            action.decision,
        )
        self._records.appendleft(record)
        self.added += 1
        return record

    def latest(self, count: int) -> list[Record]:
        """At most `count`, newest first."""
        return [record for record, _ in zip(self._records, range(count), strict=False)]

    def of(self, request_id: int) -> list[Record]:
        """The dispatches of one request that are still kept, newest first."""
        return [record for record in self._records if record.request_id == request_id]
