"""Warmset: new sessions start only where their caches will last; a cost in seconds chooses.

Source: this project (docs/reference/warmset.md). The factor for requests lies between the sum of
Llumnix (2026) and the product of LMetric (arXiv 2603.15202, 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView, median

_FULL = 0.9  # share of a cache beyond which what comes pushes something out
_REDO = 0.9  # a worker that can redo all its sessions in this share of their cycle needs no cache
_GAMMA = 1.5  # an all-cold worker never reaches its bound: by this factor holding pays sooner
_EMPTY = 0.2  # how much of a new session's price does not depend on how full its worker is
_REUSED = 0.1  # chance that somebody wants what an unknown prompt leaves in a cache
_RELIEF_S = 5.0  # who has waited for longer may go where it fits least badly, if the pool has room


@dataclass(frozen=True, slots=True)
class Warmset:
    """cost [s] = (queue + prefill + pushed out) * sqrt(requests + 1) * keep + requests * step/2
    + evicted/10. step: of decode, the pool's median. keep, to the power of the chance that the
    session returns: for one that is warm, 1 at home and `stay` elsewhere; else 0.2 + the share of
    memory that sessions want. evicted: where caches are full, seconds of prefill that is not warm.
    A warm session moves only where its cache pushes nothing out. A new one, or one whose cache is
    lost, starts where it mostly is, fits within `gate` or needs no cache, or waits: +inf.

    Spill depth of H hits, queue drained: P^2 / (P - H)^2 - 1 requests of P tokens, less for steps.
    Unknown hits are taken as they are. Unknown capacities: never waits.

    gate: share of a worker's KV memory that sessions at home may want; above 0.
    stay: how many times dearer a warm session is away from home; 1 or more.
    """

    gate: float = 1.0
    stay: float = 2.0
    needs_sessions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.gate < float("inf"):
            raise ValueError(f"gate is {self.gate}; it must be finite, above 0")
        if not 1.0 <= self.stay < float("inf"):
            raise ValueError(f"stay is {self.stay}; it must be finite, 1 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        t = self.terms(request, fleet, state)
        work_s = t["queue_s"] + t["prefill_s"] + t["pushed_out_s"]
        costs: Floats = work_s * t["crowd"] * t["keep"] + t["steps_s"] + t["evicted_s"]
        costs[t["over_tokens"] > 0.0] = np.inf
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> Mapping[str, Floats]:
        """The factors of the cost; `over_tokens` above 0 shuts a worker to this request."""
        hits, wanted = fleet.hit_tokens, fleet.working_set_tokens
        private, trunk, cached = request.private_tokens, request.trunk_tokens, fleet.cached_tokens
        capacity = np.nan_to_num(fleet.kv_capacity_tokens, nan=np.inf)
        lacks_trunk = ~fleet.holds_trunk & (hits < min(trunk, request.prompt_tokens - 1))
        after = wanted + (private + trunk * lacks_trunk)
        pushed = np.minimum(np.maximum(after - _FULL * capacity, 0.0), private)
        if request.standing == "warm":
            home = fleet.worker_id == request.home_id
            over, keep = np.where(home, 0.0, pushed), np.where(home, 1.0, self.stay)
            pushed, evicted = over, np.zeros(len(fleet))
        else:
            there = 2 * (hits - trunk) > private  # most of what is its own: it pushes little out
            over = np.where(there | self._open(request, fleet, after, capacity), 0.0, private)
            keep = _EMPTY + np.minimum((wanted + private) / capacity, 4.0)
            evicted = np.clip(np.nan_to_num(cached) + private - capacity, 0.0, private)
        return {
            "queue_s": fleet.queued_prefill_s,
            "prefill_s": fleet.prefill_s(request.prompt_tokens - hits, hits),
            "pushed_out_s": pushed * (fleet.working_set_s / np.maximum(wanted, 1.0)),
            "crowd": np.sqrt(fleet.requests + 1.0),
            "steps_s": fleet.requests * (0.5 * median(fleet.step_s)),
            "keep": keep**request.return_chance,
            "evicted_s": evicted * (_REUSED / fleet.prefill_tokens_per_s),
            "over_tokens": over,
        }

    def _open(self, request: RequestView, fleet: FleetView, after: Floats, size: Floats) -> Bools:
        wanted, redo_s, cycle_s = fleet.working_set_tokens, fleet.working_set_s, fleet.cycle_s
        fits: Bools = (after <= self.gate * size) | (wanted == 0.0) | (cycle_s == 0.0)
        if not fits.all():
            own_s = fleet.prefill_s(request.private_tokens, request.trunk_tokens)
            fits |= redo_s + own_s <= _REDO * cycle_s
            full_s = _FULL * redo_s / np.maximum(wanted / size, 1e-9)
            if _GAMMA * float(full_s.mean()) < cycle_s:  # a full cache saves less than it idles
                fits[:] = True
        if request.held_s > _RELIEF_S and not fits.any():
            need, over = after - wanted, after - self.gate * size
            room = float(wanted.sum() + need.min()) <= _FULL * float(size.sum())
            if room or (need > self.gate * size).all():  # or it would wait for ever
                fits |= over <= over.min()
        return fits
