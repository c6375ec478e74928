"""Power of two choices: compares two random workers and chooses the one with fewer requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The cost is the number of unfinished requests on two randomly drawn rows, and +inf on all
    others.

    The load is nearly as even as with a comparison of all workers, and requests do not herd if
    loads are stale (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        rows = len(fleet)
        if rows < 2:
            return fleet.requests.astype(np.float64)
        first, second = drawn_pair(rows, request.draw)
        costs = np.full(rows, np.inf)
        costs[first] = fleet.requests[first]
        # Half a request more: the first one wins a tie. Were the tie left to `pick`, the same
        # draw would choose both the pair and the winner, and some rows would win more often.
        costs[second] = fleet.requests[second] + 0.5
        return costs


def drawn_pair(rows: int, draw: float) -> tuple[int, int]:
    """Return two distinct rows below `rows`, which is 2 or more; `draw` is uniform in [0, 1)."""
    first, other = divmod(int(draw * rows * (rows - 1)), rows - 1)
    return first, other if other < first else other + 1
