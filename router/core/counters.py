"""What the core did, counted for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from router.core.actions import Decision


@dataclass(slots=True)
class CoreCounters:
    """Lifetime: process. Only ever grow."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (policy, reason)
    rejections: Counter[str] = field(default_factory=Counter)  # by code
    expected_hit_tokens: int = 0
    prompt_tokens: int = 0  # of dispatched requests
    holds: int = 0
    retries: int = 0
    ejections: int = 0

    def dispatched(self, decision: Decision) -> None:
        """A request was sent."""
        self.decisions[decision.policy, decision.reason] += 1
        self.expected_hit_tokens += decision.hit_tokens
        self.prompt_tokens += decision.prompt_tokens

    def rejected(self, code: str) -> None:
        """A request was turned away."""
        self.rejections[code] += 1
