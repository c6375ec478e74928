"""Round robin: sends each arrival to the next worker, whatever its load or cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Cost 0 for row `serial mod rows`, 1 for the others.

    There is no counter to keep: the arrival's serial is one. A request that is asked again after
    a worker fell away meets `rows - 1` rows. Every `rows`-th arrival lost that worker, and
    `rows = 1 modulo (rows - 1)`, so successive ones still land on successive rows.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs = np.ones(len(fleet))
        if len(fleet):
            costs[request.serial % len(fleet)] = 0.0
        return costs
