"""Power of two choices: look at two workers, take the one with fewer requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Two distinct rows from the draw; cost = unfinished requests, +inf for all other rows.

    Nearly as even as asking everyone, and it does not herd when loads are stale (Mitzenmacher,
    "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        rows = len(fleet)
        if rows < 2:
            return fleet.requests.astype(np.float64)
        pairs = rows * (rows - 1)
        pair = int(request.draw * pairs)
        first, other = divmod(pair, rows - 1)
        second = other if other < first else other + 1
        costs = np.full(rows, np.inf)
        costs[first] = fleet.requests[first]
        # Half a request more: the first one wins a tie. Were the tie left to `pick`, the same
        # draw would choose both the pair and the winner, and some rows would win more often.
        costs[second] = fleet.requests[second] + 0.5
        return costs
