"""Warmset, the default policy, starts a new session only on a worker where its cache will last.

`docs/reference/warmset.md` derives the formula. `kernels/src/decision/warmset.cpp` is the same
formula in C++, with functions and constants of the same names in the same order. The results of
both files are equal to the last bit, so each change must be made in both. The router decides with
the C++ code and explains its decisions with this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.arrays import between, median
from policies.contract import Bools, FleetView, Floats, RequestView
from policies.record import record
from policies.work import (
    busy_share,
    delay_to_others_s,
    memory_wait_s,
    own_prefill_s,
    trunk_share_s,
)

# Where the constants come from. "Experiments": simulations of generated agents in which the rule
# was found; other seeds, shapes and traces confirmed them. "Replays": ten minutes of two recorded
# traces and of generated sessions, three draws each. "Chosen": any value of that size will do.

# Share of a worker's KV memory that is filled before new tokens push others' out. Experiments.
FULL = 0.9
# Share of a turn. A worker that can compute all its sessions again in this time needs no cache.
# It must be below 1, or the worker could not keep up. Experiments.
REDO = 0.9
# Factor, no unit, on the seconds of prefill that a full cache saves. A worker whose caches all miss
# never reaches its full rate, so a full cache saves more than those seconds. Replays.
GAMMA = 1.2
# Chance, 0..1, that a block pushed out of a full cache would have been used again, whoever's it is.
# This chance is small because its term only has to spread sessions over idle caches. Chosen.
REUSED = 0.1
# Share of a worker's memory. A new session's place costs no more where sessions want even more of
# it: the price stays finite on a worker of tiny memory. Chosen.
WANTED_MOST = 4.0
# Seconds of waiting after which a session may go where it exceeds the memory least. Replays.
RELIEF_S = 5.0
# Seconds that a cold session waits for relief, for each second of its own prefill. Replays.
COLD_WAIT = 4.0
# Share of a worker's memory that sessions may want with a relieved cold session. Replays.
COLD_FULL = 1.15
# Seconds of waiting after which a relieved cold session has no such limit. Experiments.
COLD_WAIT_MOST_S = 20.0
# Seconds that a session waits until it may go to an idle worker, for each second of its own
# prefill: in that time the worker could have computed it a hundred times. Chosen.
IDLE_WAIT = 100.0


@record
class Memory:
    """The capacity of each worker's KV caches, and the tokens that sessions want to keep there.

    Lifetime: one decision.
    """

    wanted_tokens: Floats  # tokens that sessions at home there will want again
    needed_tokens: Floats  # the same with this request's session
    size_tokens: Floats  # tokens that the worker's caches keep
    redo_token_s: Floats  # seconds to compute one wanted token again
    holding_pays: bool  # waiting for room in a cache saves more than it costs
    caches_last: bool  # a cache is still there when its session returns


@dataclass(frozen=True, slots=True)
class Warmset:
    """Cost in seconds: the request's own wait on each worker, and the delay it causes to others.

    cost = queue + prefill + memory_wait + delay_to_others + running + pushed_out + place + evicted

    A new session, or a session that has lost its cache, costs +inf on a worker where its cache
    would not last (`_is_open`). If this is so on all workers, the request waits at the router. Hits
    count in full even if KV events are missing. An unknown KV capacity counts as the median of the
    known ones.

    Spill depth, the number of requests that a cached prefix attracts before an idle worker gets
    one: let a worker hold a prefix that saves H of the P seconds of a prompt's prefill, and let no
    worker have a queue. This worker costs less than an idle one until it has

        H / (P - H + step / 2) / `running` unfinished requests.

    gate: share of a worker's KV memory that its sessions may want to keep; above 0.
    stay: factor on a warm session's cost on workers without its cache; 1 or more.
    running: weight of the delay to running answers, 0..1. With a higher weight, more answers meet
        their targets, but first tokens come later.
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
        seconds = self.terms(request, fleet, state)
        over_tokens = seconds.pop("over_tokens")
        closed = np.where(over_tokens > 0.0, np.inf, 0.0)
        costs: Floats = sum(seconds.values(), start=closed)
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the terms of the cost in seconds, and `over_tokens`, float64[rows] each.

        A worker is excluded (cost +inf) if its `over_tokens` are above 0.
        """
        memory = _memory(request, fleet)
        own_s = own_prefill_s(request, fleet)
        seconds = {
            "queue_s": fleet.queued_prefill_s,
            "prefill_s": own_s - trunk_share_s(fleet, own_s),
            "memory_wait_s": memory_wait_s(request, fleet),
            "delay_to_others_s": delay_to_others_s(fleet, own_s),
            "running_s": self._running_s(fleet, own_s),
            "pushed_out_s": _pushed_out_s(request, memory),
        }
        if request.standing == "warm":
            return self._place_warm(request, fleet, memory, seconds)
        return self._place_new(request, fleet, memory, seconds)

    def _running_s(self, fleet: FleetView, own_s: Floats) -> Floats:
        """Return the weighted seconds by which the request delays a worker's unfinished requests.

        The shape is float64[rows]. The unfinished requests get no token while the request's prefill
        is computed. Then they share decode steps with the request, which costs each of them half a
        decode step more. That half step, of the pool's median worker, also spreads fully cached
        prompts over several workers.
        """
        delay_s = own_s + 0.5 * median(fleet.step_s)
        seconds: Floats = self.running * fleet.requests * delay_s
        return seconds

    def _place_warm(
        self, request: RequestView, fleet: FleetView, memory: Memory, seconds: dict[str, Floats]
    ) -> dict[str, Floats]:
        """Return the cost terms of a request whose session has a warm cache on a worker.

        If caches last until sessions return, the cost on all other workers is multiplied by `stay`
        to the power of the session's `return_chance`. No worker is excluded.
        """
        nothing = np.zeros(len(fleet))
        away = fleet.worker_id != request.home_id
        seconds["pushed_out_s"] *= away
        dearer = away * memory.caches_last * (self.stay**request.return_chance - 1.0)
        return seconds | {
            "place_s": dearer * sum(seconds.values(), start=nothing),
            "evicted_s": nothing,
            "over_tokens": nothing,
        }

    def _place_new(
        self, request: RequestView, fleet: FleetView, memory: Memory, seconds: dict[str, Floats]
    ) -> dict[str, Floats]:
        """Return the cost terms of a request whose session is new or has lost its cache.

        The terms include the cost of KV memory for the session's cache.
        """
        nothing = np.zeros(len(fleet))
        private = request.private_tokens
        again_s = fleet.prefill_s(private, request.trunk_tokens)
        chance = memory.caches_last * request.return_chance
        wanted_share = np.minimum(memory.needed_tokens / memory.size_tokens, WANTED_MOST)
        cached = np.fmax(fleet.cached_tokens, 0.0)  # unknown: 0
        evicted_tokens = between(cached + private - memory.size_tokens, private)
        is_open = self._is_open(request, fleet, memory, again_s)
        return seconds | {
            "place_s": again_s * chance * wanted_share,
            "evicted_s": evicted_tokens * (REUSED / fleet.prefill_tokens_per_s),
            "over_tokens": np.where(is_open, nothing, private),
        }

    def _is_open(
        self, request: RequestView, fleet: FleetView, memory: Memory, again_s: Floats
    ) -> Bools | bool:
        """Return True for each worker on which a new or cold session may start, bool[rows].

        A cold session is one that has lost its cache. The result is a single True if all workers
        qualify. `again_s` is the time in seconds to recompute the session's private tokens.
        """
        if not memory.holding_pays:
            return True
        last_chance = request.may_wait_s <= 0.0  # it would be refused
        waited_s = np.inf if last_chance else request.held_s
        fits = memory.needed_tokens - self.gate * memory.size_tokens <= 0.0
        nobody_home = memory.wanted_tokens == 0.0
        needs_no_cache = fleet.working_set_s + again_s <= REDO * fleet.cycle_s
        idle_for_long = (fleet.requests == 0) & (waited_s > IDLE_WAIT * again_s)
        is_open: Bools = fits | nobody_home | needs_no_cache | idle_for_long
        if waited_s > RELIEF_S and not is_open.any():
            is_open = self._relief(request, memory, again_s, waited_s)
        # Most of its private tokens are cached there: it pushes little out.
        is_there: Bools = 2 * (fleet.hit_tokens - request.trunk_tokens) > request.private_tokens
        return is_there | is_open

    def _relief(
        self, request: RequestView, memory: Memory, again_s: Floats, waited_s: float
    ) -> Bools:
        """Return True for the workers that may take a session after a long wait, bool[rows].

        These are the workers where the session would exceed the KV memory by the fewest tokens. The
        result is False for all workers, except in three cases: the pool as a whole has room; no
        worker could ever hold the session; or the session has lost its cache and the request has
        waited long. `again_s` is the time in seconds to recompute the session's private tokens.
        """
        own_tokens = memory.needed_tokens - memory.wanted_tokens
        never_fits = (own_tokens > self.gate * memory.size_tokens).all()
        pool_tokens = memory.wanted_tokens.sum() + own_tokens.min()
        pool_has_room = pool_tokens <= FULL * memory.size_tokens.sum()
        most = np.inf
        if not (never_fits or pool_has_room):
            if request.standing != "cold" or waited_s <= COLD_WAIT * again_s.min():
                return np.zeros(len(own_tokens), dtype=np.bool_)
            if waited_s < COLD_WAIT_MOST_S:
                most = COLD_FULL
        over = memory.needed_tokens - self.gate * memory.size_tokens
        relieved: Bools = (over <= over.min()) & (memory.needed_tokens <= most * memory.size_tokens)
        return relieved


def _memory(request: RequestView, fleet: FleetView) -> Memory:
    """Return the capacity of each worker's KV caches, and the tokens that sessions want there.

    The result also says if it pays to wait for room in a cache (`holding_pays`): if a full cache
    saves at least as many seconds of prefill as pass between two requests of a session
    (`FleetView.cycle_s`).
    """
    wanted, size = fleet.working_set_tokens, fleet.kept_tokens(request.prompt_tokens)
    trunk = request.trunk_tokens
    lacks_trunk = fleet.hit_tokens < min(trunk, request.prompt_tokens - 1)
    needed = wanted + request.private_tokens
    needed += trunk * (~fleet.holds_trunk & lacks_trunk)
    redo_token_s = fleet.working_set_s / np.maximum(wanted, 1.0)
    saved_s = GAMMA * FULL * float((redo_token_s * size).sum()) / max(len(fleet), 1)
    return Memory(
        wanted_tokens=wanted,
        needed_tokens=needed,
        size_tokens=size,
        redo_token_s=redo_token_s,
        # Otherwise a worker with a full cache idles for longer than the cache saves. While no
        # session has returned yet, the turn is unknown (0), and waiting is assumed not to pay.
        holding_pays=saved_s >= fleet.cycle_s > 0.0,
        # A cache is overwritten only while its worker computes prefill. While no session has
        # returned yet, caches are assumed to last.
        caches_last=saved_s >= busy_share(fleet) * fleet.cycle_s,
    )


def _pushed_out_s(request: RequestView, memory: Memory) -> Floats:
    """Return the seconds to recompute what this request evicts from other sessions' caches.

    The shape is float64[rows]. The request evicts at most as many tokens as it has private ones,
    which no other session uses. The result is 0 if caches do not last until sessions return.
    """
    most = request.private_tokens * memory.caches_last
    tokens = between(memory.needed_tokens - FULL * memory.size_tokens, most)
    return tokens * memory.redo_token_s
