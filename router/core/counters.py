"""What the core did, counted for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from policies.contract import Standing
from router.core.actions import Decision

HELD_SECONDS = (0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)


@dataclass(slots=True)
class HeldTimes:
    """How long requests of one standing waited at the router. Lifetime: process."""

    sum_s: float = 0.0
    # Waits up to each of HELD_SECONDS and above the one before, then those above all.
    counts: list[int] = field(default_factory=lambda: [0] * (len(HELD_SECONDS) + 1))

    def add(self, wait_s: float) -> None:
        """One wait is over."""
        wait_s = max(wait_s, 0.0)
        self.sum_s += wait_s
        self.counts[bisect_left(HELD_SECONDS, wait_s)] += 1

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, waits up to it), as Prometheus has them."""
        names = (*(f"{bound:g}" for bound in HELD_SECONDS), "+Inf")
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(slots=True)
class CoreCounters:
    """Lifetime: process. Only ever grow."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (policy, reason)
    rejections: Counter[str] = field(default_factory=Counter)  # by code
    expected_hit_tokens: int = 0
    prompt_tokens: int = 0  # of dispatched requests
    holds: int = 0
    retries: int = 0
    retries_refused: int = 0  # for want of a budget
    ejections: int = 0
    ejections_withheld: int = 0  # too much of the pool was aside already
    held: dict[Standing, HeldTimes] = field(
        default_factory=lambda: {"new": HeldTimes(), "cold": HeldTimes(), "warm": HeldTimes()}
    )

    def dispatched(self, decision: Decision) -> None:
        """A request was sent."""
        self.decisions[decision.policy, decision.reason] += 1
        self.expected_hit_tokens += decision.hit_tokens
        self.prompt_tokens += decision.prompt_tokens

    def rejected(self, code: str) -> None:
        """A request was turned away."""
        self.rejections[code] += 1
