"""The policy Least requests chooses the worker with the fewest unfinished requests and ignores
caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class LeastRequests:
    """The cost is the number of unfinished requests (running + waiting); ties are broken at random.

    This router's own dispatches count at once; those of other routers are as old as the load
    report.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return fleet.requests.astype(np.float64)
