"""Warmset: new sessions start only where their caches will last; a cost in seconds chooses among.

Source of the rule: what this project derived and measured (docs/policies.md, Warmset). The damped
factor for requests lies between Llumnix's sum (2026) and LMetric's product (arXiv 2603.15202).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView

_PRICED_FULL = 0.9  # share of a cache beyond which what comes pushes something out
_RUN_COLD = 0.9  # a worker that could redo all its sessions in this share of the time is safe
_GAMMA = 1.5  # how far below its bound an all-cold worker stays


@dataclass(frozen=True, slots=True)
class Warmset:
    """cost [s] = (queue + own prefill + others' caches pushed out) * sqrt(requests + 1).

    gate: share of a worker's KV memory that sessions at home may want; above 0.
    stay: a session that is warm at home costs so many times more elsewhere; 1 or more.
    """

    gate: float = 1.0
    stay: float = 2.0
    needs_sessions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.gate < float("inf"):
            raise ValueError(f"gate is {self.gate}; it must be above 0")
        if not 1.0 <= self.stay < float("inf"):
            raise ValueError(f"stay is {self.stay}; it must be 1 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        hits = fleet.hit_tokens
        capacity = np.where(np.isnan(fleet.kv_capacity_tokens), np.inf, fleet.kv_capacity_tokens)
        wanted = fleet.working_set_tokens
        need = request.private_tokens + np.where(fleet.holds_trunk, 0.0, request.trunk_tokens)
        home = fleet.worker_id == request.home_id
        warm = request.standing == "warm"
        over = wanted + need - _PRICED_FULL * capacity
        pushed = np.clip(over, 0.0, request.private_tokens)
        if warm:
            pushed[home] = 0.0
        evict_s = pushed * (fleet.working_set_s / np.maximum(wanted, 1.0))
        own_s = fleet.prefill_s(request.prompt_tokens - hits, hits)
        work_s = fleet.queued_prefill_s + own_s + evict_s
        costs: Floats = work_s * np.sqrt(fleet.requests + 1.0)
        if warm:
            costs[~home] *= self.stay
            costs[~home & (over > 0.0)] = np.inf
            return costs
        costs *= 0.2 + np.minimum((wanted + request.private_tokens) / capacity, 4.0)
        costs[~self._open(request, fleet, wanted, need, capacity)] = np.inf
        return costs

    def _open(
        self, request: RequestView, fleet: FleetView, wanted: Floats, need: Floats, capacity: Floats
    ) -> Bools:
        cycle_s = fleet.cycle_s
        fits: Bools = (wanted + need <= self.gate * capacity) | (wanted == 0.0)
        if cycle_s <= 0.0:
            return fits
        all_cold_s = fleet.working_set_s
        own_cold_s = fleet.prefill_s(request.private_tokens, request.trunk_tokens)
        fits |= all_cold_s + own_cold_s <= _RUN_COLD * cycle_s
        if fits.any():
            return fits
        full_cold_s = _PRICED_FULL * capacity * (all_cold_s / np.maximum(wanted, 1.0))
        if _GAMMA * float(full_cold_s.mean()) < cycle_s:
            fits[:] = True
        return fits
