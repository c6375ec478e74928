"""Hybrid: the work a request brings and the work it finds, in seconds of each worker's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.thresholds import check_thresholds, reached_thresholds


@dataclass(frozen=True, slots=True)
class Hybrid:
    """cost [s] = (missing + load_factor * (queued + requests * step_tokens)) / own prefill rate.

    All terms are prefill tokens, so the cost is seconds at the worker's own speed. Missing plus
    queued is Llumnix's cache-aware dispatch; it is blind to decode, so every unfinished request
    counts one decode step, as the tokens that could be computed in it: what it costs the newcomer
    and what the newcomer costs it. Missing tokens are priced by how many workers hold them
    (`policies.pricing`). Unknown hits are a lower bound and taken as they are; a hit in host
    memory or on disk counts by the share of its prefill that loading it spares.

    Spill depth of a prefix of H tokens on m workers, queues drained: each holder may have
    H / (m * step_tokens * load_factor) requests more than an idle worker before that gets one.

    load_factor: missing tokens that a token of load is worth, 0 or more.
    max_requests, max_queued_tokens, max_kv_fraction: a worker that has reached one gets +inf
    while another is below its own (`policies.thresholds`); None = no limit. The worker's own
    limits go first.
    """

    unit: ClassVar[str] = "s"
    load_factor: float = 1.0
    max_requests: float | None = None
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_factor < float("inf"):
            raise ValueError(f"load_factor is {self.load_factor}; it must be finite, 0 or more")
        check_thresholds(self.max_requests, self.max_queued_tokens, self.max_kv_fraction)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        # All unfinished requests, not the running ones only: one whose prefill should be over by
        # the model, but whose first token has not come yet, would otherwise weigh nothing.
        load_tokens = fleet.load_tokens(fleet.step_tokens)
        if self.load_factor != 1.0:
            load_tokens *= self.load_factor
        work_tokens = fleet.missing_tokens(request.prompt_tokens) + load_tokens
        costs: Floats = work_tokens / fleet.prefill_tokens_per_s
        reached = reached_thresholds(
            fleet, self.max_requests, self.max_queued_tokens, self.max_kv_fraction
        )
        if reached is not None:
            costs[reached] = np.inf
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """The cost's three summands, seconds each."""
        rate, factor = fleet.prefill_tokens_per_s, self.load_factor
        return {
            "missing_s": fleet.missing_tokens(request.prompt_tokens) / rate,
            "queued_s": factor * fleet.queued_prefill_tokens / rate,
            "requests_s": factor * fleet.requests * fleet.step_tokens / rate,
        }
