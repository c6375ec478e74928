"""Round robin: sends each arrival to the next worker, whatever its load or cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The cost is 0 for the row `serial mod rows`, and 1 for the others, where `serial` counts
    arrivals, so that no other counter is needed.

    If a worker has left and its requests are placed again, only `rows - 1` rows are left. The lost
    requests were every `rows`-th arrival, and `rows = 1 modulo (rows - 1)`, so successive ones
    still go to successive rows.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs = np.ones(len(fleet))
        if len(fleet):
            costs[request.serial % len(fleet)] = 0.0
        return costs
