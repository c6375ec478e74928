"""KV load: chooses the worker with the least KV memory in use, whatever it has cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Cost = KV tokens in use, as a share of capacity where every row's capacity is known.

    In use: what the worker reported plus own dispatches since. A worker that never reported
    counts our own ledger (`context_tokens + queued_prefill_tokens`). Tokens and shares cannot be
    compared, so a single unknown capacity makes all rows count tokens.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        own = fleet.context_tokens + fleet.queued_prefill_tokens
        used = np.where(np.isnan(fleet.kv_used_tokens), own, fleet.kv_used_tokens)
        capacity = fleet.kv_capacity_tokens
        if len(fleet) and bool(np.all(capacity > 0.0)):  # False for NaN
            shares: Floats = used / capacity
            return shares
        return used
