"""The wrapper Late binding holds a request for the worker with its cache, if that is faster than
recomputing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.pick import TIE
from policies.work import load_s

_HEARD_S = 5.0  # a worker that sent neither load nor KV events for longer may hang


@dataclass(frozen=True, slots=True)
class LateBinding:
    """Holds a request for the worker with most of its prompt, if this is faster than recomputing.

    Let h be the worker that holds most of the prompt. If the workers with the policy's lowest cost
    hold less of it, the request is held while h has more than one decode step of prefill queued
    and, in seconds,

        held + load[h] < (best of load + missing - missing[h]) * (1 - held / max_wait_s)

    `held` is the wait until now, `load` is `policies.work.load_s`, and `missing` is the time to
    compute the missing tokens at their price (`policies.pricing`). The left side is the total wait
    for h. The right side is the most that waiting can gain: the time on the policy's best worker,
    less the time that h needs for its own missing tokens. The gain shrinks during the wait and is 0
    at `max_wait_s`.

    The core calls the policy again after every finished request and on every tick. Once h has at
    most one step queued, a held request is sent to h if the policy gives h a finite cost, and else
    to the policy's choice. The rule is selective pushing (SkyWalker, EuroSys 2026), towards h
    instead of any free worker.

    The request is never held in these cases: no worker has any of the prompt; a best worker has as
    much of it as h; KV events of h or of a best worker are missing; h sent neither a load report
    nor KV events for 5 s, so it may hang; or the wait has lasted `max_wait_s`, which is finite and
    above 0.

    The wrapper is made for policies that count requests, and for `max_queued_tokens`. Policies
    whose costs are in seconds, such as `hybrid`, and the wrapper `bounded_load` have already sent
    such a request to the queue of h. Spill depth, which is the load that h may have before an idle
    worker gets the request: the spill depth of the wrapped policy, or the seconds that the cached
    prefix saves if these are more.
    """

    max_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.max_wait_s < float("inf"):
            raise ValueError(f"max_wait_s is {self.max_wait_s}; it must be finite, above 0")

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        row = self._row_to_wait_for(costs, request, fleet)
        if row < 0:
            return costs
        if fleet.queued_prefill_tokens[row] > fleet.step_tokens:
            return np.full(len(fleet), np.inf)
        if request.held_s == 0.0 or costs[row] == np.inf:
            return costs
        return np.where(np.arange(len(fleet)) == row, costs, np.inf)

    def terms(
        self, costs: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> Mapping[str, Floats]:
        """Return the terms `load_s` and `missing_s` of each worker in seconds, float64[rows] each.

        `load_s` is the worker's load, and `missing_s` the time to compute the prompt tokens that
        the worker lacks.
        """
        return {
            "load_s": load_s(fleet, fleet.step_tokens),
            "missing_s": _missing_s(request, fleet),
        }

    def _row_to_wait_for(self, costs: Floats, request: RequestView, fleet: FleetView) -> int:
        """Return the row of the worker to wait for, or -1 if the request should not wait."""
        hits = fleet.hit_tokens
        left = 1.0 - request.held_s / self.max_wait_s
        if left <= 0.0 or len(hits) < 2 or not (most := int(hits.max())):
            return -1
        lowest = float(costs.min())
        best: Bools = costs <= lowest + TIE * max(1.0, abs(lowest))
        if lowest == np.inf or hits[best].max() >= most or fleet.hits_unknown[best].any():
            return -1
        heard_s = np.minimum(fleet.load_age_s, fleet.event_age_s)
        holds = (hits == most) & ~fleet.hits_unknown & (heard_s <= _HEARD_S)
        if not holds.any():
            return -1
        loads_s = load_s(fleet, fleet.step_tokens)
        missing_s = _missing_s(request, fleet)
        ready_s = loads_s + missing_s
        row = int(np.where(holds, ready_s, np.inf).argmin())
        gain_s = float(ready_s[best].min()) - float(missing_s[row])
        return row if request.held_s + float(loads_s[row]) < gain_s * left else -1


def _missing_s(request: RequestView, fleet: FleetView) -> Floats:
    seconds: Floats = fleet.missing_tokens(request.prompt_tokens) / fleet.prefill_tokens_per_s
    return seconds
