"""llm-d's weighted scorers: the cached share of the prompt, a short queue, and free KV memory.

Source: llm-d router (formerly Gateway API inference extension), scheduler profiles of the precise
prefix-cache guide, 2025 and 2026: prefix 2, queue 1, KV 1; a later default is 3, 2, 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class LlmD:
    """The cost is -(prefix_weight * prefix + queue_weight * queue + kv_weight * kv).

    Each of the three scores is in [0, 1]. prefix = hit tokens / prompt tokens; with `min_max` it is
    scaled over the workers instead, so that the longest hit counts 1 and the shortest 0, however
    small both are. queue = (longest - own) / (longest - shortest) of waiting requests, or 1 if all
    are equal. kv = 1 - KV fraction in use; a worker that never reported it counts as empty. Unknown
    hits count as the known ones.

    Spill depth: the queue's score is at most queue_weight, however long a queue is. If
    prefix_weight * hit share is above queue_weight + kv_weight, all requests stay with the holder.
    """

    prefix_weight: float = 2.0
    queue_weight: float = 1.0
    kv_weight: float = 1.0
    min_max: bool = False

    def __post_init__(self) -> None:
        for name in ("prefix_weight", "queue_weight", "kv_weight"):
            weight = getattr(self, name)
            if not 0.0 <= weight < float("inf"):
                raise ValueError(f"{name} is {weight}; it must be finite, 0 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["prefix"] + terms["queue"] + terms["kv"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the weighted scores for cached prefix, queue length and free KV memory.

        Each is float64[rows], at most 0; the lowest value favours a worker most.
        """
        hits = fleet.hit_tokens.astype(np.float64)
        prefix = 1.0 - _scaled(hits) if self.min_max else hits / max(request.prompt_tokens, 1)
        kv = 1.0 - np.nan_to_num(fleet.kv_fraction, nan=0.0)
        return {
            "prefix": -self.prefix_weight * prefix,
            "queue": -self.queue_weight * _scaled(fleet.waiting.astype(np.float64)),
            "kv": -self.kv_weight * kv,
        }


def _scaled(values: Floats) -> Floats:
    """Return the values scaled to 0..1, where the smallest value gets 1 and the largest gets 0.

    If all values are equal, all get 1.
    """
    if len(values) == 0:
        return values
    low, high = values.min(), values.max()
    if high == low:
        return np.ones(len(values))
    scaled: Floats = (high - values) / (high - low)
    return scaled
