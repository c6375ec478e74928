"""LBGR: estimates milliseconds for the uncached prompt, the queued work, and a learned residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import (
    Dispatched,
    Failure,
    Finish,
    FirstToken,
    Prefilled,
    WorkerChange,
    legs_over,
)
from policies.published.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Lbgr:
    """Cost in ms = max(1, own + queue + residual), with own = slope_ms x missing tokens / 1000, at
    least 1.

    `queue` is the sum of `own` of the requests that were sent; it shrinks by 1/32 every 20 ms, and
    a request's remainder is subtracted when it ends. `residual` is one constant per worker, learned
    by recursive least squares with the forgetting factor `forgetting`, from max(1, answer time -
    own - queue), with `own` and `queue` as of the dispatch. The answer time ends with the last
    token, as published, or with `first_token` at the first.

    Source: the router of RLT/LBGR (ICLR 2026, arXiv 2601.18999): 1,000 ms per 1,000 characters,
    forgetting 0.95. Here the slope is per 1,000 tokens; a 32B model on two H100 needs 64.

    Spill depth: decode counts only through the residual. Without queued work and with equal
    residuals, the holder of H tokens keeps a prefix while its queue is below slope_ms x H / 1000
    ms. Unknown hits count as the known ones. A worker without an answer yet has residual 0, and so
    attracts requests.
    """

    slope_ms: float = 1_000.0
    forgetting: float = 0.95
    first_token: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.slope_ms < float("inf"):
            raise ValueError(f"slope_ms is {self.slope_ms}; it must be finite, above 0")
        if not 0.0 < self.forgetting <= 1.0:
            raise ValueError(f"forgetting is {self.forgetting}; it must be above 0, at most 1")

    def initial_state(self) -> Lanes:
        return Lanes()

    def observe(self, fact: Any, state: Lanes) -> Lanes:
        if isinstance(fact, Dispatched):
            own_ms = max(self.slope_ms * fact.uncached_tokens / 1_000.0, 1.0)
            state.send((fact.request_id, fact.leg), fact.worker_id, own_ms, fact.now_s)
        elif isinstance(fact, FirstToken) and self.first_token:
            for leg in ("both", "decode"):
                state.answered((fact.request_id, leg), fact.now_s, self.forgetting)
        elif isinstance(fact, Finish | Failure | Prefilled):
            learns = not (self.first_token or isinstance(fact, Failure))
            for leg in legs_over(fact):
                if learns:
                    state.answered((fact.request_id, leg), fact.now_s, self.forgetting)
                state.release((fact.request_id, leg), fact.now_s)
        elif isinstance(fact, WorkerChange) and fact.state == "gone":
            state.of.pop(fact.worker_id, None)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: Lanes) -> Floats:
        missing = np.maximum(request.prompt_tokens - fleet.hit_tokens, 0)
        own_ms = np.maximum(missing * (self.slope_ms / 1_000.0), 1.0)
        now_s, lanes = request.now_s, map(state.of.get, fleet.worker_id.tolist())
        rest_ms = [0.0 if n is None else n.queued_ms(now_s) + n.residual_ms for n in lanes]
        costs: Floats = np.maximum(own_ms + np.array(rest_ms), 1.0)
        return costs
