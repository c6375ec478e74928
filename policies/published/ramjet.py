"""Ramjet: a cached prefix counts, but never for more than a few requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class Ramjet:
    """The cost is the limited price of a shorter hit than the longest, plus the weighted load.

      cost = min((most hits - hits) / point_tokens, max_points)
             + load_weight * (unfinished requests + queued prefill / request_tokens)

    Source: Ramjet, as NVIDIA Dynamo 1.6 ports it (2026). With `relative=false` the first term is
    -min(hits / point_tokens, max_points) instead, which is equal for all workers that hold more
    than 16,384 tokens. Relative to the longest hit, long sessions stay apart.

    Spill depth: min(S / point_tokens, max_points) / load_weight requests for a prefix of S tokens:
    S / 2048, and 8 from 16,384 tokens on.

    Unknown hits count as the known ones, a lower bound; tokens in host memory and on disk count as
    missing. No signal that the policy reads can be absent.
    """

    point_tokens: float = 512.0
    max_points: float = 32.0
    load_weight: float = 4.0
    request_tokens: float = 8192.0
    relative: bool = True

    def __post_init__(self) -> None:
        for name in ("point_tokens", "request_tokens"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite, above 0")
        for name in ("max_points", "load_weight"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite, 0 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["load"] + terms["affinity"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the two parts of the cost: load and cache affinity.

        The affinity is lower for workers with more of the prompt cached.
        """
        hits = fleet.hit_tokens
        load = fleet.requests + fleet.queued_prefill_tokens / self.request_tokens
        if self.relative:
            behind = hits.max(initial=0) - hits
            affinity = np.minimum(behind / self.point_tokens, self.max_points)
        else:
            affinity = -np.minimum(hits / self.point_tokens, self.max_points)
        return {"load": self.load_weight * load, "affinity": affinity}
