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
    """The cost is minus the hit tokens on the GPU; ties (no worker has hits, or all have equal
    ones) are broken at random.

    If KV events are missing, the known hits are used, which are a lower bound. The spill depth is
    unlimited: the first worker that computed a popular prefix receives all requests that begin with
    it.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return -fleet.hit_tokens.astype(np.float64)
