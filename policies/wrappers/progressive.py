"""Progressive weight: affinity while there is room, balance as the pool fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Dispatched
from policies.work import load_s, step_tokens

_REQUESTS = 64  # over so many the mean of what requests bring is smoothed

State = tuple[int, float]  # dispatches seen, up to _REQUESTS; smoothed uncached tokens of one


@dataclass(frozen=True, slots=True)
class Progressive:
    """cost + weight * unit * load [s]: what the policy inside says, and more and more of the load.

    weight = load_factor * clip((u - low) / (high - low), 0, 1)
    u      = arrivals per s * (mean uncached tokens + a decode step's) / the rows' tokens per s

    u is the share of the pool's prefill capacity that is asked for. The mean is of what dispatches
    really lacked (smoothed over 64), so hits count at their value: the more of the prompts is
    cached, the longer there is room for affinity. load: `policies.work.load_s`, above the least
    loaded row's.

    unit turns seconds into the units of the policy inside. Its costs differ by `span` where the
    seconds of missing prefill (each token shared among its holders, `policies.pricing`) differ by
    `span_s`: a second is worth span / span_s. So it is 1 for costs in seconds of what is missing,
    tokens per second for `kv_prefix`, and does not depend on scale. Where nobody holds more than
    another, the costs' span over that of the loads: then both weigh alike; 1 where the policy is
    indifferent. With weight 1, `hybrid?load_factor=0|progressive` is `hybrid`. Made for policies
    of affinity: one that weighs load itself gets it twice.

    Spill depth of H tokens on m workers: H / (m * step_tokens * weight) requests. low = 0 keeps
    some weight at any load; below a higher low one prefix may fill one worker while the pool as a
    whole has room. Unknown hits are a lower bound; all signals read are always known. The arrival
    rate is that of the whole router: of several pools, each seems fuller than it is.
    low: 0 or more. high: above low. load_factor: weight at high and beyond, 0 or more.
    """

    low: float = 0.0
    high: float = 0.5
    load_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high < float("inf"):
            raise ValueError(
                f"low is {self.low} and high is {self.high}; they must be finite, 0 <= low < high"
            )
        if not 0.0 <= self.load_factor < float("inf"):
            raise ValueError(f"load_factor is {self.load_factor}; it must be finite, 0 or more")

    def initial_state(self) -> State:
        return 0, 0.0

    def observe(self, fact: Any, state: State) -> State:
        if not isinstance(fact, Dispatched):
            return state
        seen = min(state[0] + 1, _REQUESTS)
        return seen, state[1] + (fact.uncached_tokens - state[1]) / seen

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: State) -> Floats:
        is_open = np.isfinite(costs)
        weight = self.weight(fleet, state)
        if weight == 0.0 or np.count_nonzero(is_open) < 2:
            return costs
        loads_s = load_s(fleet)
        missing_s = fleet.missing_tokens(request.prompt_tokens) / fleet.prefill_tokens_per_s
        unit = _unit(costs[is_open], missing_s[is_open], loads_s[is_open])
        adjusted: Floats = costs + weight * unit * (loads_s - float(loads_s[is_open].min()))
        return adjusted

    def weight(self, fleet: FleetView, state: State) -> float:
        """Missing seconds that a second of load is worth, 0..load_factor."""
        tokens = fleet.arrival_rate_per_s * (state[1] + step_tokens(fleet))
        used = tokens / float(fleet.prefill_tokens_per_s.sum()) if len(fleet) else 0.0
        return self.load_factor * min(max((used - self.low) / (self.high - self.low), 0.0), 1.0)


def _unit(costs: Floats, missing_s: Floats, loads_s: Floats) -> float:
    """Cost per second; see the class."""
    span, span_s = _span(costs), _span(missing_s)
    if span == 0.0:
        return 1.0
    if span_s <= 1e-9 * float(missing_s.max()):
        span_s = _span(loads_s)
    return span / span_s if span_s > 0.0 else 1.0


def _span(values: Floats) -> float:
    return float(values.max() - values.min())
