"""Mooncake's Conductor: chooses the worker with the least estimated time to first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Cost in seconds = queued prefill + prefill of the missing tokens, at the worker's own speed.

    Source: Mooncake (FAST 2025), Conductor. In the source, a worker may also fetch the prefix from
    the best holder, if that holds more of it by a balancing ratio; so hot blocks spread. Here no
    worker can fetch from another: only its own cache counts, and a copy is made by computing it.
    Nothing is rejected early here, because the router has limits of its own.

    Spill depth: no number of requests. A request leaves the holder if its queue takes longer than
    the prefill of the prefix, attention included; decoding does not count.

    Unknown hits count as the known ones, a lower bound; tokens in host memory and on disk count as
    missing. Until the cost of attention is measured, prefill time is linear in tokens.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["queue_s"] + terms["prefill_s"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the two parts of the cost in seconds: queued prefill and the request's prefill."""
        # The last token is computed even if all tokens are cached.
        cached = np.minimum(fleet.hit_tokens, request.prompt_tokens - 1)
        prefill_s = fleet.prefill_s(request.prompt_tokens - cached, cached)
        return {"queue_s": fleet.queued_prefill_s, "prefill_s": prefill_s}
