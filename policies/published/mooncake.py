"""Mooncake's Conductor: the least estimated time to first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class Mooncake:
    """cost [s] = queued prefill + prefill of what is missing, at the worker's own speed.

    Source: Mooncake (FAST 2025), Conductor. There a worker may also fetch the prefix from the best
    holder where that has more of it than itself by a balancing ratio, which is how hot blocks
    spread; here no worker can fetch from another, so only its own cache counts and a copy is made
    by computing it. Nothing is rejected early: the router's own limits do that.

    Spill depth: none by requests. A holder is left when its queue is longer than the prefill of the
    prefix takes, attention included; what it decodes is not priced.

    Unknown hits are a lower bound, taken as they are; host and disk tiers count as missing. Before
    anybody told what attention costs, prefill time is linear in tokens.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["queue_s"] + terms["prefill_s"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the two parts of the cost in seconds: queued prefill and the request's prefill."""
        # The last token is computed even where all are resident.
        cached = np.minimum(fleet.hit_tokens, request.prompt_tokens - 1)
        prefill_s = fleet.prefill_s(request.prompt_tokens - cached, cached)
        return {"queue_s": fleet.queued_prefill_s, "prefill_s": prefill_s}
