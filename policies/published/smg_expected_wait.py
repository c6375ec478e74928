"""SMG's power of two choices by expected wait: of two drawn workers, the one that is free
sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, Ints, RequestView
from policies.pick import TIE
from policies.power_of_two import drawn_pair
from policies.published.least_load import FULL


@dataclass(frozen=True, slots=True)
class SmgExpectedWait:
    """The cost is the expected wait in seconds on two randomly drawn rows, and +inf on all others.

    wait = queued prefill tokens / throughput + kv_weight_s * k / (1 - k), where k is the share of
    KV memory in use, at most 0.999.

    Source: smg-project/smg 2463a7c and 11b1fe0 (2026), policy `power_of_two` with its default
    metric `expected_wait`: 0.15 s, 2,000 tokens/s, 1,024 tokens a request. The source's signals are
    replaced here:

    - The queue, and the tokens sent since the last poll (every 10 s): this router's own counts,
      which include each dispatch at once, less the tokens that are cached or computed since.
    - Throughput, the tokens that a worker generates a second: its running requests / its step
      time, or `idle_tokens_per_s` if no request runs. `tokens_per_s` sets one value for all.
    - A worker without a report: a worker whose k is NaN. It waits as long as the other of the
      pair, plus `request_tokens` for each of its requests. If both are NaN, cost = requests.

    The first of the pair wins ties. Hits are not read.

    Spill depth: no affinity.
    """

    kv_weight_s: float = 0.15
    idle_tokens_per_s: float = 2_000.0
    request_tokens: float = 1_024.0
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.kv_weight_s < float("inf"):
            raise ValueError(f"kv_weight_s is {self.kv_weight_s}; it must be finite, 0 or more")
        for name in ("idle_tokens_per_s", "request_tokens"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite, above 0")
        if self.tokens_per_s is not None and not 0.0 < self.tokens_per_s < float("inf"):
            raise ValueError(
                f"tokens_per_s is {self.tokens_per_s}; it must be finite and above 0, or none"
            )

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        rows = len(fleet)
        if rows < 2:
            return fleet.requests.astype(np.float64)
        pair = np.array(drawn_pair(rows, request.draw))
        waits = self._waits(fleet, pair)
        # The draw has chosen the pair. If `pick` used the same draw for a tie, the winner would
        # depend on the pair, so the second worker loses ties here.
        waits[1] += 2.0 * TIE * max(1.0, abs(waits[1]))
        costs = np.full(rows, np.inf)
        costs[pair] = waits
        return costs

    def _waits(self, fleet: FleetView, pair: Ints) -> Floats:
        """Return the expected waits of the two workers in rows `pair`, float64[2]."""
        requests = fleet.requests[pair].astype(np.float64)
        k = fleet.kv_fraction[pair]
        told = ~np.isnan(k)
        if not np.count_nonzero(told):
            return requests
        rates = self._rates(fleet, pair)
        share = np.clip(k, 0.0, FULL)
        waits: Floats = fleet.queued_prefill_tokens[pair] / rates
        waits += self.kv_weight_s * share / (1.0 - share)
        if np.count_nonzero(told) == 1:
            known, other = (0, 1) if told[0] else (1, 0)
            waits[other] = waits[known] + requests[other] * self.request_tokens / rates[known]
        return waits

    def _rates(self, fleet: FleetView, pair: Ints) -> Floats:
        """Return the throughput of the two workers in tokens per second, float64[2]."""
        if self.tokens_per_s is not None:
            return np.full(2, self.tokens_per_s)
        generated = fleet.running[pair] / fleet.step_s[pair]
        return np.where(generated > 0.0, generated, self.idle_tokens_per_s)
