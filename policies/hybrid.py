"""The policy Hybrid adds the work that a request brings to a worker and the work that waits there,
in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.thresholds import check_thresholds, reached_thresholds


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Cost in seconds: the work that a request brings to a worker, and the work that waits there.

        cost = (missing + load_factor * (queued + requests * step_tokens)) / own prefill rate

    `missing` are the prompt tokens that the worker must compute, `queued` the prefill tokens that
    wait there, and `requests` its unfinished requests. All terms are in prefill tokens; the
    worker's own rate turns them into seconds. Missing plus queued tokens is Llumnix's cache-aware
    dispatch, which ignores decode. Here each unfinished request also adds the tokens that could be
    computed in one decode step, because that is how much it and the new request delay each other. A
    missing token costs less if several workers hold it (`policies.pricing`). If KV events are
    missing, the known hits are used. A hit in host memory or on disk counts by the share of its
    prefill time that loading saves.

    Spill depth, the number of requests that a cached prefix attracts before an idle worker gets
    one: let m workers without a queue hold a prefix of H tokens. Each of them gets up to

        H / (m * step_tokens * load_factor) requests.

    load_factor: number of missing tokens that one token of load is worth; 0 or more.
    max_requests, max_queued_tokens, max_kv_fraction: a worker at one of these limits costs +inf
        while another worker is below its limits (`policies.thresholds`); None means no limit. A
        limit in the worker's own options is used instead.
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
        """Return the three summands of the cost in seconds, float64[rows] each."""
        rate, factor = fleet.prefill_tokens_per_s, self.load_factor
        return {
            "missing_s": fleet.missing_tokens(request.prompt_tokens) / rate,
            "queued_s": factor * fleet.queued_prefill_tokens / rate,
            "requests_s": factor * fleet.requests * fleet.step_tokens / rate,
        }
