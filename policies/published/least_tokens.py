"""Least tokens: joins the queue with the fewest tokens, not the fewest requests.

Source: classic (least work left); among routers of LLM requests TensorRT-LLM's load balancing by
tokens (2025) and SMG's minimum tokens of data-parallel ranks (2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The cost is the queued prefill tokens plus the context tokens of running requests.

    Both count only this router's own requests. The prefix is ignored, so there is no affinity and
    no spill depth.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs: Floats = fleet.queued_prefill_tokens + fleet.context_tokens
        return costs
