"""The wrapper Bounded load excludes a worker if the request would raise its load far above the
mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.work import brought_s, load_s, whole_s


@dataclass(frozen=True, slots=True)
class BoundedLoad:
    """Excludes worker i unless load_i + w_i <= (1 + epsilon) * mean load + w_max, in seconds.

    load_i is the load of worker i (`policies.work.load_s`: queued prefill and a decode step for
    each unfinished request, at its own speed). w_i is the work that the request brings there, less
    its hits. w_max is the work that it would bring to the slowest worker with nothing cached. Mean
    and maximum are over the rows that the policy leaves open (finite cost); the others stay +inf.
    The rule is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018;
    KubeAI's CHWBL counts requests), in seconds.

    Some worker is always admissible: some open row k has load_k <= mean load, and w_k <= w_max, so
    load_k + w_k <= mean + w_max <= (1 + epsilon) * mean + w_max. Hence the wrapper never holds a
    request.

    The bound: dispatching raises load_i by w_i at most, so right after it load_i <= (1 + epsilon) *
    mean + w_max, with the mean before it. Nothing else raises a load (time and finished requests
    lower it; another router's requests, once reported, and a slower calibration are outside any
    rule). So every worker's load is at most (1 + epsilon) * M + W at any time, where M is the
    greatest mean, and W the greatest w_max since the worker was last idle. This holds for the mean
    over all workers if the policy leaves all of them open; if it excludes the idle ones, the mean
    is that of the busy ones.

    Spill depth: a holder's w_max - w_i is the work that its hit saves. So in an otherwise idle pool
    of n workers it takes requests until it has H / rate / (1 - (1 + epsilon) / n) seconds of work.
    Unknown hits are a lower bound, so w_i is an upper bound, and the bound on loads holds. All
    signals that the wrapper reads are always known. epsilon: 0 or more; small values give even
    loads, large ones more affinity.
    """

    epsilon: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.epsilon < float("inf"):
            raise ValueError(f"epsilon is {self.epsilon}; it must be finite, 0 or more")

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        is_open = np.isfinite(costs)
        if np.count_nonzero(is_open) < 2:  # no worker, or the one that is always admissible
            return costs
        return np.where(self._above_s(is_open, request, fleet) > 0.0, np.inf, costs)

    def terms(
        self, costs: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> Mapping[str, Floats]:
        """Return `above_s`, the seconds by which the request would lift a worker above its bound.

        The shape is float64[rows]. The bound is a load in seconds. A worker with 0 or less stays
        within its bound.
        """
        is_open = np.isfinite(costs)
        if not is_open.any():
            return {}
        return {"above_s": self._above_s(is_open, request, fleet)}

    def _above_s(self, is_open: Any, request: RequestView, fleet: FleetView) -> Floats:
        step = fleet.step_tokens
        before_s, whole = load_s(fleet, step), whole_s(request, fleet, step)
        mean_s = float(before_s.sum(where=is_open)) / np.count_nonzero(is_open)
        most_s = float(whole.max(where=is_open, initial=0.0))
        bound_s = (1.0 + self.epsilon) * mean_s + most_s
        # A rounding error must not exclude a worker that is exactly at the bound.
        above_s: Floats = before_s + brought_s(request, fleet, step) - bound_s * (1.0 + 1e-9)
        return above_s
