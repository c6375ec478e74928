"""Late binding: wait at the router for the holder, where that is cheaper than recomputing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.pick import TIE

_HEARD_S = 5.0  # a worker that told neither load nor KV events for longer may hang


@dataclass(frozen=True, slots=True)
class LateBinding:
    """All +inf (hold) while the worker that holds most of the prompt is busy and worth a wait.

    Where the policy's best rows hold less than the holder h, take the time to the first token

        now, at the best of them:   elsewhere = queued_s + prefill_s(what it lacks)
        at the holder, once free:   queued_s[h] + prefill_s[h](what it lacks)

    and hold while   held_s + queued_s[h] < (elsewhere - prefill_s[h]) * (1 - held_s / max_wait_s).

    The right side is what waiting may still gain; it shrinks with the time already waited, so what
    was held grows less and less patient, and is 0 at `max_wait_s`. The core asks again on every
    finish and tick. It is released when h has a decode step's worth of prefill left or less: what
    the policy then still has against h, no waiting cures. Selective pushing (SkyWalker, EuroSys
    2026), towards one worker instead of any.

    It never holds when nobody has any of the prompt, or a best row has as much of it; when the hits
    of the holder or of a best row are a lower bound only; when the holder told neither load nor KV
    events for 5 s (it may hang, and its queue would not move); nor beyond `max_wait_s`, above 0
    and finite. Without it a policy in seconds, as hybrid, sends most such requests to the
    holder's own queue; it matters round policies that count requests, and round limits. Where the
    policy is indifferent (equal costs) and one of the equals is the holder, nothing waits.
    """

    max_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.max_wait_s < float("inf"):
            raise ValueError(f"max_wait_s is {self.max_wait_s}; it must be finite, above 0")

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return np.full(len(fleet), np.inf) if self._holds(costs, request, fleet) else costs

    def terms(
        self, costs: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> Mapping[str, Floats]:
        """`first_token_s`: seconds to the first token at each worker, its queue included."""
        return {"first_token_s": fleet.queued_prefill_s + _missing_s(request, fleet)}

    def _holds(self, costs: Floats, request: RequestView, fleet: FleetView) -> bool:
        hits = fleet.hit_tokens
        left = 1.0 - request.held_s / self.max_wait_s
        if left <= 0.0 or len(hits) < 2 or not (most := int(hits.max())):
            return False
        lowest = float(costs.min())
        best: Bools = costs <= lowest + TIE * max(1.0, abs(lowest))
        if lowest == np.inf or hits[best].max() >= most or fleet.hits_unknown[best].any():
            return False
        queued_s, missing_s = fleet.queued_prefill_s, _missing_s(request, fleet)
        heard_s = np.minimum(fleet.load_age_s, fleet.event_age_s)
        holds = (hits == most) & ~fleet.hits_unknown & (heard_s <= _HEARD_S)
        if not holds.any():
            return False
        row = int(np.where(holds, queued_s, np.inf).argmin())
        wait_s = float(queued_s[row])
        if wait_s <= fleet.step_s[row]:
            return False
        elsewhere_s = float((queued_s + missing_s)[best].min())
        return request.held_s + wait_s < (elsewhere_s - float(missing_s[row])) * left


def _missing_s(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: seconds to compute what each worker lacks of the prompt."""
    cached = np.minimum(fleet.hit_tokens, max(request.prompt_tokens - 1, 0))
    return fleet.prefill_s(request.prompt_tokens - cached, cached)
