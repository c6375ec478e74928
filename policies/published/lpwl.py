"""LPWL (least prefill work left): queued prefill plus the prefill that the request would add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class Lpwl:
    """The cost is queued prefill + missing tokens; among equals, fewer unfinished requests win.

    Source: the cache-aware dispatch of Llumnix (its gateway of 2026: missing and all uncomputed
    prefill first, load second), studied as "least prefill work left" in a public study of agentic
    traffic (8 H20, Qwen3-Coder-30B-A3B, 2026). The tie-break is a share of one token, so it may
    also decide between workers that differ by less than a token of work.

    Spill depth: none. A holder without queued prefill is chosen however many requests it decodes;
    only prefill that it has not computed sends a request elsewhere.

    Unknown hits count as the known ones, a lower bound; tokens in host memory and on disk count as
    missing. The cost is in tokens, whatever the worker's speed. No signal that the policy reads can
    be absent.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["queued_tokens"] + terms["missing_tokens"] + terms["tie_tokens"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the parts of the cost in tokens: queued, missing, and a tie-breaker below 1."""
        requests = fleet.requests
        return {
            "queued_tokens": fleet.queued_prefill_tokens,
            "missing_tokens": np.float64(request.prompt_tokens) - fleet.hit_tokens,
            "tie_tokens": requests / (float(requests.max(initial=0)) + 1.0),
        }
