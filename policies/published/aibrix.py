"""The policy of AIBrix's prefix cache: it chooses the best match among workers whose load is not
far above the mean.

Source: vllm-project/aibrix gateway, algorithm prefix-cache, 2025 and 2026. `imbalance_factor` was
added later; 0 gives the older rule, which compares only the gap (and requires one request more).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class Aibrix:
    """Prefers the longest match among workers with at most mean + deviations * standard deviation
    requests.

    If there is none, the worker with the fewest requests is chosen. If the most and the fewest
    requests differ by `imbalance_gap` or more, and the most are above imbalance_factor * (mean +
    1), only the workers with the fewest requests are considered. Equal matches go to the worker
    with fewer requests. If KV events are missing, the known hits are used; no other signal is read.

    Spill depth: at most `imbalance_gap`. It is much less if the other workers have equal loads:
    among N workers, a single worker with more requests than the rest lies sqrt(N - 1) deviations
    above the mean. So with the defaults and N > 2, one additional request sends the next one
    elsewhere.
    """

    imbalance_gap: int = 8
    imbalance_factor: float = 2.0
    deviations: float = 1.0

    def __post_init__(self) -> None:
        for name in ("imbalance_gap", "imbalance_factor", "deviations"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be finite, 0 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        requests, hits = fleet.requests, fleet.hit_tokens
        rows = len(fleet)
        if rows == 0:
            return np.zeros(0)
        most, least = int(requests.max()), int(requests.min())
        mean = float(requests.sum()) / rows
        away = requests - mean
        limit = mean + self.deviations * float(np.sqrt((away @ away) / rows))
        if most - least >= self.imbalance_gap and most > self.imbalance_factor * (mean + 1.0):
            others = requests > least
        else:
            others = (hits == 0) | (requests > limit)
        # Who is passed over for its load is taken by its load, whatever it has of the prompt.
        return places(others, np.where(others, 0, -hits), requests)
