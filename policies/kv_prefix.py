"""KV prefix: chooses the worker with the longest cached prefix, whatever its load.

The policy is a baseline. It overloads the workers that hold a popular prefix, which other policies
avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class KvPrefix:
    """Cost = -hit tokens on the GPU; ties (nobody has it, or all do) are drawn.

    Unknown hits count as what is known of them, a lower bound. It never spills: the first worker
    that computed a popular prefix receives everything that begins with it.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return -fleet.hit_tokens.astype(np.float64)
