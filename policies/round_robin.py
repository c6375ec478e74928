"""Round robin: sends each arrival to the next worker, whatever its load or cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The cost is 0 for the row `serial mod rows`, and 1 for the others.

    No counter is needed, because the arrival's serial number is one. A request that is asked again
    after a worker has left meets `rows - 1` rows. Every `rows`-th arrival lost that worker, and
    `rows = 1 modulo (rows - 1)`, so successive ones still go to successive rows.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs = np.ones(len(fleet))
        if len(fleet):
            costs[request.serial % len(fleet)] = 0.0
        return costs
