"""What became of one request, as the client saw it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"  # 200 and the whole answer
    REJECTED = "rejected"  # told to come back later: 429 or 503
    FAILED = "failed"  # anything else: to the client it is lost


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row per request. Times are wall clock. Lifetime: measurement."""

    serial: int
    scheduled_s: float  # when it was due, seconds from the start of the run
    sent_s: float  # when it left; the difference is the generator's own lateness
    verdict: Verdict
    status: int  # HTTP status, 0 when no answer came
    worker: str | None  # the router's `x-warmroute-worker`
    e2e_ms: float  # from `scheduled_s` to the last byte
    prompt_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None  # from `scheduled_s` to the first token
    itl_ms: float | None = None  # mean gap between tokens
    itl_max_ms: float | None = None  # longest gap between two arrivals of tokens
    cached_tokens: int | None = None  # as the worker's usage says
    error: str | None = None
    turn: int | None = None  # of its session, from 0; None: an open loop, where nobody counts

    @property
    def late_ms(self) -> float:
        """How late the generator itself sent it."""
        return max(0.0, (self.sent_s - self.scheduled_s) * 1000)
