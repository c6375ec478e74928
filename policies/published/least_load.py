"""SMG's least load: the time until the queue is empty, plus a penalty for nearly full KV memory.

Source: lightseekorg/smg gateway, policy least_load, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView

FULL = 0.999  # the penalty stops rising here: at 1 it would be infinite


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Cost in seconds = queued prefill tokens / rate + kv_weight_s * k / (1 - k).

    k is the share of KV memory in use. k / (1 - k) is the mean number of requests in an M/M/1 queue
    of that utilization; the weight turns it into seconds. The rate is the worker's own, calibrated;
    `tokens_per_s` sets one rate for all workers. The source divides by generated tokens per second,
    and takes 2,000 if a worker reports none. This router's counts include each dispatch at once;
    the source must add dispatches itself between two polls. An unknown share of KV memory counts as
    0. The prefix is ignored.

    Spill depth: no affinity.
    """

    kv_weight_s: float = 0.15
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.kv_weight_s < float("inf"):
            raise ValueError(f"kv_weight_s is {self.kv_weight_s}; it must be finite, 0 or more")
        if self.tokens_per_s is not None and not 0.0 < self.tokens_per_s < float("inf"):
            raise ValueError(
                f"tokens_per_s is {self.tokens_per_s}; it must be finite and above 0, or none"
            )

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["drain_s"] + terms["kv_s"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the two parts of the cost in seconds: `drain_s` and `kv_s`.

        `drain_s` is the time to compute the queued prefill, and `kv_s` the penalty for KV memory in
        use.
        """
        rate = fleet.prefill_tokens_per_s if self.tokens_per_s is None else self.tokens_per_s
        share = np.clip(np.nan_to_num(fleet.kv_fraction, nan=0.0), 0.0, FULL)
        return {
            "drain_s": fleet.queued_prefill_tokens / rate,
            "kv_s": self.kv_weight_s * share / (1.0 - share),
        }
