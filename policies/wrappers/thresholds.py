"""The wrapper Thresholds excludes workers above a fixed load limit, or with more load than other
workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.thresholds import at_thresholds, check_thresholds
from policies.work import load_s, whole_s

_SIGMAS = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Excludes workers that have reached a threshold, while another open worker is below all of
    them.

    Fixed thresholds are `max_requests`, `max_queued_tokens` and `max_kv_fraction`; each worker's
    own thresholds of these names replace them (`policies.thresholds`; TensorRT-LLM's and Dynamo's
    routers have such limits).

    With `spread` k there is also a threshold from the fleet: a worker is excluded if its load
    exceeds median + max(k * sigma, the work that one request like this would bring to it uncached).
    Loads are of the open rows, in seconds (`policies.work`), and sigma = 1.4826 * the median
    absolute deviation (Hampel, 1974: up to half of the pool may be outliers without an effect on
    either). The load cannot be spread more evenly than by one request, so smaller differences do
    not count: equal loads, or a single request in an idle pool, exclude no worker. For an even
    number of rows, the lower of the middle two is the median, so that of two workers the fuller one
    can exceed it. Seconds are at each worker's own speed, so a slow worker is full with less.

    If every open row has reached a threshold, or the policy leaves only one row open, no worker is
    excluded: the wrapper never holds a request. An unknown KV share reaches no threshold; the other
    signals are always known. Hits are not read.

    Spill depth: `max_requests`, or the requests that reach the deviation; else the policy's own.
    """

    max_requests: float | None = None
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        check_thresholds(self.max_requests, self.max_queued_tokens, self.max_kv_fraction)
        if self.spread is not None and not 0.0 <= self.spread < float("inf"):
            raise ValueError(f"spread is {self.spread}; it must be finite, 0 or more, or none")

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        is_open = np.isfinite(costs)
        if np.count_nonzero(is_open) < 2:
            return costs
        full = at_thresholds(fleet, self.max_requests, self.max_queued_tokens, self.max_kv_fraction)
        if self.spread is not None:
            apart = self._above_s(self.spread, is_open, request, fleet) > 0.0
            full = apart if full is None else full | apart
        if full is None or not np.count_nonzero(is_open & ~full):
            return costs
        return np.where(full, np.inf, costs)

    def terms(
        self, costs: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> Mapping[str, Floats]:
        """Return `above_s`, the seconds by which each worker's load exceeds the threshold.

        The threshold follows from the loads of all workers. A worker with 0 or less is below it.
        """
        is_open = np.isfinite(costs)
        if self.spread is None or not is_open.any():
            return {}
        return {"above_s": self._above_s(self.spread, is_open, request, fleet)}

    def _above_s(
        self, spread: float, is_open: Bools, request: RequestView, fleet: FleetView
    ) -> Floats:
        step = fleet.step_tokens
        loads_s = load_s(fleet, step)
        middle_s = _lower_median(loads_s[is_open])
        sigma_s = _SIGMAS * _lower_median(np.abs(loads_s[is_open] - middle_s))
        apart_s = np.maximum(spread * sigma_s, whole_s(request, fleet, step))
        above_s: Floats = loads_s - (middle_s + apart_s)
        return above_s


def _lower_median(values: Floats) -> float:
    """Return the median of `values`, or the lower of two middle values; `values` is not empty."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])
