"""Least tokens: join the queue that holds the fewest tokens, not the fewest requests.

Source: classic (least work left); among routers of LLM requests TensorRT-LLM's load balancing by
tokens (2025) and SMG's minimum tokens of data-parallel ranks (2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """cost = queued prefill tokens + context tokens of running requests, both of our own ledger.

    Requests that other routers sent are not seen. The prefix is ignored: spill depth none, no
    affinity.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs: Floats = fleet.queued_prefill_tokens + fleet.context_tokens
        return costs
