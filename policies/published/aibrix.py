"""AIBrix's prefix cache: the best match whose load does not stick out of the pool's.

Source: vllm-project/aibrix gateway, algorithm prefix-cache, 2025 and 2026. `imbalance_factor` came
later; 0 gives the older rule, which looks at the gap alone (and asks for one request more).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class Aibrix:
    """The longest match with requests <= mean + deviations * standard deviation; else the fewest.

    Where the most and the fewest requests differ by `imbalance_gap` or more, and the most are above
    imbalance_factor * (mean + 1), only the workers with the fewest are looked at. Equal matches go
    to fewer requests. Unknown hits count as what is known of them; no other signal is asked for.

    Spill depth: at most `imbalance_gap`. Much less where the others are level: of N workers one
    that alone has more than the rest lies sqrt(N - 1) deviations above the mean, so that with the
    defaults and N > 2 the first request more sends the next one elsewhere.
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
