"""llm-d's optimized baseline: stay with the cache until its backlog is seconds behind the others'.

Source: llm-d router, profile optimized-baseline, 2026: match 0.8, 18,000 ms, 15,928 tokens/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class LlmDSticky:
    """cost = queued prefill tokens + prompt tokens the worker lacks; workers without the cache come
    after all that hold `match_threshold` of the prompt, while these are not saturated.

    Saturated: the shortest backlog among them exceeds the shortest of all by more than `patience_s`
    seconds. The source drains backlogs at one measured rate; here each worker's calibrated one
    does, and `tokens_per_s` sets one for all. Unknown hits count as what is known of them; no other
    signal is asked for.

    Spill depth: `patience_s` seconds of prefill, some 280,000 tokens with the defaults. Requests do
    not count: one that decodes is no backlog.
    """

    match_threshold: float = 0.8
    patience_s: float = 18.0
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.match_threshold <= 1.0:
            raise ValueError(f"match_threshold is {self.match_threshold}; it must be in (0, 1]")
        if not 0.0 <= self.patience_s < float("inf"):
            raise ValueError(f"patience_s is {self.patience_s}; it must be finite, 0 or more")
        if self.tokens_per_s is not None and not 0.0 < self.tokens_per_s < float("inf"):
            raise ValueError(
                f"tokens_per_s is {self.tokens_per_s}; it must be finite and above 0, or none"
            )

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        queued, hits = fleet.queued_prefill_tokens, fleet.hit_tokens
        missing = np.maximum(request.prompt_tokens - hits, 1)
        costs: Floats = queued + missing
        sticky = hits >= self.match_threshold * request.prompt_tokens
        if not np.count_nonzero(sticky):
            return costs
        rate = fleet.prefill_tokens_per_s if self.tokens_per_s is None else self.tokens_per_s
        backlog_s = queued / rate
        if backlog_s[sticky].min() - backlog_s.min() <= self.patience_s:
            costs[~sticky] += costs.max()
        return costs
