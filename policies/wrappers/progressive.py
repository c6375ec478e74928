"""The wrapper Progressive prefers the policy's own costs while the pool has room, and even loads as
it fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.facts import Dispatched
from policies.work import load_s

_REQUESTS = 64  # dispatches over which tokens and gaps are averaged


class State(NamedTuple):
    """The averages over the latest dispatches: uncached tokens, and seconds between two
    dispatches.
    """

    seen: int  # up to _REQUESTS
    uncached_tokens: float
    gap_s: float  # from one dispatch to the next
    last_s: float


@dataclass(frozen=True, slots=True)
class Progressive:
    """Adds the workers' load to the costs of any policy, with more weight as the pool fills.

    adjusted = cost + weight * unit * load
    weight   = load_factor * clip((u - low) / (high - low), 0, 1)
    u        = requests per s * (mean uncached tokens + a decode step's) / the rows' tokens per s

    `u` is the share of the pool's prefill capacity in use, by the last 64 dispatches and the
    uncached tokens that they had. So the more of the prompts is cached, the longer the policy's own
    costs decide. `load` is the worker's `policies.work.load_s` less that of the least loaded
    worker, in seconds.

    `unit` converts seconds of load to the unit of the policy's costs. It is the range of the costs
    divided by the range of the seconds of missing prefill (`policies.pricing`). So for costs in
    seconds of missing prefill it is 1, and for `kv_prefix` it is tokens per second. If all workers
    lack the same tokens, the range of the loads is the divisor instead. If all costs are equal,
    `unit` is 1. `hybrid?load_factor=0|progressive` equals `hybrid` at weight 1.

    Spill depth, the number of requests that a cached prefix attracts before an idle worker gets
    one: let m workers without a queue hold a prefix of H tokens. Each of them gets up to H / (m *
    step_tokens * weight) requests. With a `low` above 0, one prefix may fill one worker. If KV
    events are missing, the known hits are used. The rate of requests is that of the whole router,
    so each of several pools seems fuller than it is.

    low: value of `u` up to which the weight is 0; 0 or more.
    high: value of `u` from which the weight is `load_factor`; above `low`.
    load_factor: weight at `high` and beyond; 0 or more.
    """

    low: float = 0.0
    high: float = 0.5
    load_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high < float("inf"):
            told = f"low is {self.low} and high is {self.high}"
            raise ValueError(f"{told}; they must be finite, 0 <= low < high")
        if not 0.0 <= self.load_factor < float("inf"):
            raise ValueError(f"load_factor is {self.load_factor}; it must be finite, 0 or more")

    def initial_state(self) -> State:
        return State(0, 0.0, 0.0, 0.0)

    def observe(self, fact: Any, state: State) -> State:
        if not isinstance(fact, Dispatched):
            return state
        seen = min(state.seen + 1, _REQUESTS)
        gap_s = fact.now_s - state.last_s if state.seen else 0.0
        gap_s = state.gap_s + (gap_s - state.gap_s) / max(min(state.seen, _REQUESTS), 1)
        tokens = state.uncached_tokens + (fact.uncached_tokens - state.uncached_tokens) / seen
        return State(seen, tokens, gap_s, fact.now_s)

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: State) -> Floats:
        is_open = np.isfinite(costs)
        step = fleet.step_tokens
        weight = self.weight(request.now_s, fleet, step, state)
        if weight == 0.0 or np.count_nonzero(is_open) < 2:
            return costs
        loads_s = load_s(fleet, step)
        missing_s = fleet.missing_tokens(request.prompt_tokens) / fleet.prefill_tokens_per_s
        low_s, loads_span_s = _span(loads_s, is_open)
        span, (least_s, span_s) = _span(costs, is_open)[1], _span(missing_s, is_open)
        if span_s <= 1e-9 * (least_s + span_s):  # all workers hold equally much
            span_s = loads_span_s
        unit = span / span_s if span > 0.0 and span_s > 0.0 else 1.0
        adjusted: Floats = costs + weight * unit * (loads_s - low_s)
        return adjusted

    def weight(self, now_s: float, fleet: FleetView, step: float, state: State) -> float:
        """Return the weight of the load, 0..load_factor, which grows as the pool fills.

        The weight is the number of seconds of missing prefill that one second of load is worth.
        `step` is the number of prefill tokens in one decode step.
        """
        if state.seen < 2 or not len(fleet):
            return 0.0
        # The time since the last dispatch counts: after a pause the pool has room.
        gap_s = max(state.gap_s, now_s - state.last_s, 1e-6)
        used = (state.uncached_tokens + step) / gap_s / float(fleet.prefill_tokens_per_s.sum())
        return self.load_factor * min(max((used - self.low) / (self.high - self.low), 0.0), 1.0)


def _span(values: Floats, is_open: Bools) -> tuple[float, float]:
    """Return the minimum of the values where `is_open` is True, and their maximum minus minimum."""
    least = float(values.min(where=is_open, initial=np.inf))
    return least, float(values.max(where=is_open, initial=-np.inf)) - least
