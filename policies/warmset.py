"""Warmset, of this project: new sessions start only where their caches will last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.arrays import between, median
from policies.contract import Bools, FleetView, Floats, RequestView
from policies.work import busy_share, invested_s, later_s, new_s, room_s

_FULL = 0.9  # share of a cache beyond which what comes pushes something out
_REDO = 0.9  # a worker that can redo all its sessions in this share of their cycle needs no cache
_GAMMA = 1.2  # an all-cold worker never reaches its bound: by this factor holding pays sooner
_REUSED = 0.1  # chance that somebody wants what an unknown prompt leaves in a cache
_BEGUN, _BEYOND, _AT_MOST_S = 4.0, 1.15, 20.0  # who has begun waits 4 x its work, if overfull 20 s
_RELIEF_S, _IDLE = 5.0, 100.0  # who waited 5 s: where it fits least badly; 100 x its work: if idle


@dataclass(frozen=True, slots=True)
class Warmset:
    """cost [s] = queue + prefill + room + later + running + pushed_out + place + evicted.

    room: until answers that end there have freed the memory it lacks. later: by how much its
    prefill delays all who come before that worker's queue is empty again. running: how long the
    worker's requests wait for it, each second for `running` of a second. place: for a warm session
    away from home, `stay` - 1 times all of these; for another, its cache's prefill, by the chance
    that it returns, times the memory wanted there. One that is not warm starts where it fits within
    `gate`, or waits: +inf. Unknown hits count as they are, unknown capacity as the others' median.
    Spill depth of H of P s, no queue: H / (P - H + step / 2) / `running` requests.

    gate: share of a worker's KV memory that sessions at home may want; above 0.
    stay: how many times dearer a warm session is away from home; 1 or more.
    running: weight of running answers' delay; more: more good answers, later first tokens. 0..1.
    """

    gate: float = 1.0
    stay: float = 4.0
    running: float = 0.1
    needs_sessions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least, most in (("gate", 0.01, 1e6), ("stay", 1.0, 1e6), ("running", 0.0, 1.0)):
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name} is {value}; it must be {least:g} to {most:g}")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        shut = np.where(terms.pop("over_tokens") > 0.0, np.inf, 0.0)
        costs: Floats = sum(terms.values(), start=shut)
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """The seconds of the cost; `over_tokens` above 0 shuts a worker to this request."""
        hits, wanted, redo_s = fleet.hit_tokens, fleet.working_set_tokens, fleet.working_set_s
        private, trunk = request.private_tokens, request.trunk_tokens
        size, own_s = fleet.kept_tokens(request.prompt_tokens), new_s(request, fleet)
        after = wanted + private
        after += trunk * (~fleet.holds_trunk & (hits < min(trunk, request.prompt_tokens - 1)))
        token_s, nothing = redo_s / np.maximum(wanted, 1.0), np.zeros(len(fleet))
        saved_s = _GAMMA * _FULL * float((token_s * size).sum()) / max(len(fleet), 1)
        pays = saved_s >= fleet.cycle_s > 0.0  # to hold: else a full cache saves less than it idles
        lasts = saved_s >= busy_share(fleet) * fleet.cycle_s  # so it is hoped of an unknown cycle
        seconds = {
            "queue_s": fleet.queued_prefill_s,
            "prefill_s": own_s - invested_s(fleet, own_s),
            "room_s": room_s(request, fleet),
            "later_s": later_s(fleet, own_s),
            "running_s": self.running * fleet.requests * (own_s + 0.5 * median(fleet.step_s)),
            "pushed_out_s": between(after - _FULL * size, private * lasts) * token_s,
        }
        if request.standing == "warm":
            seconds["pushed_out_s"] *= (away := fleet.worker_id != request.home_id)
            dearer = away * lasts * (self.stay**request.return_chance - 1.0)
            seconds["place_s"] = dearer * sum(seconds.values(), start=nothing)
            return seconds | {"evicted_s": nothing, "over_tokens": nothing}
        again_s = fleet.prefill_s(private, trunk)
        there = 2 * (hits - trunk) > private  # most of what is its own: it pushes little out
        fits = there | self._open(request, fleet, after, again_s) if pays else True
        evicted = between(np.fmax(fleet.cached_tokens, 0.0) + private - size, private)
        return seconds | {
            "place_s": again_s * (lasts * request.return_chance) * np.minimum(after / size, 4.0),
            "evicted_s": evicted * (_REUSED / fleet.prefill_tokens_per_s),
            "over_tokens": np.where(fits, nothing, private),
        }

    def _open(self, request: RequestView, fleet: FleetView, after: Floats, redo_s: Floats) -> Bools:
        wanted, size = fleet.working_set_tokens, fleet.kept_tokens(request.prompt_tokens)
        waited_s = request.held_s if request.may_wait_s > 0.0 else np.inf
        fits: Bools = ((over := after - self.gate * size) <= 0.0) | (wanted == 0.0)
        fits |= fleet.working_set_s + redo_s <= _REDO * fleet.cycle_s
        fits |= (fleet.requests == 0) & (waited_s > _IDLE * redo_s)
        if waited_s > _RELIEF_S and not fits.any():
            own = after - wanted  # where it is more than anybody has it would wait for ever
            room = (own > self.gate * size).all() or wanted.sum() + own.min() <= _FULL * size.sum()
            if room or (request.standing == "cold" and waited_s > _BEGUN * redo_s.min()):
                most = np.inf if room or waited_s >= _AT_MOST_S else _BEYOND
                fits |= (over <= over.min()) & (after <= most * size)
        return fits
