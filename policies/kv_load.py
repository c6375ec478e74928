"""KV load: chooses the worker with the least KV memory in use, whatever it has cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class KvLoad:
    """The cost is the KV memory in use, as a share of the capacity if all capacities are known.

    If any worker's capacity is unknown, all costs are in tokens, because tokens and shares cannot
    be compared. The tokens in use are those that the worker reported, plus those of this router's
    dispatches since. For a worker that never reported, this router's own counts are used
    (`context_tokens + queued_prefill_tokens`).
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        own = fleet.context_tokens + fleet.queued_prefill_tokens
        used = np.where(np.isnan(fleet.kv_used_tokens), own, fleet.kv_used_tokens)
        capacity = fleet.kv_capacity_tokens
        if len(fleet) and bool(np.all(capacity > 0.0)):  # False for NaN
            shares: Floats = used / capacity
            return shares
        return used
