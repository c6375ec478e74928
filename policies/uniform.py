"""The policy Random gives all workers the same cost, so that the random draw decides. It is a
baseline for other policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class Uniform:
    """The cost is 0 for every row, so that `pick` draws among all of them."""

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return np.zeros(len(fleet))
