"""Hybrid: the work a request would find and bring, in seconds of each worker's own speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.thresholds import check_thresholds, within_thresholds


@dataclass(frozen=True, slots=True)
class Hybrid:
    """cost = uncached prefill + load_factor * load."""

    load_factor: float = 1.0
    max_requests: float | None = None
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_factor < float("inf"):
            raise ValueError(f"load_factor is {self.load_factor}; it must be finite, 0 or more")
        check_thresholds(self.max_requests, self.max_queued_tokens, self.max_kv_fraction)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        uncached_tokens = np.maximum(request.prompt_tokens - fleet.hit_tokens, 1)
        prefill_s = uncached_tokens / fleet.prefill_tokens_per_s
        load_s = fleet.queued_prefill_s + fleet.running * fleet.step_s
        open_rows = within_thresholds(
            fleet, self.max_requests, self.max_queued_tokens, self.max_kv_fraction
        )
        return np.where(open_rows, prefill_s + self.load_factor * load_s, np.inf)
