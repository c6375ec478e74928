"""Warmset, this project's default: a new session starts only where its cache will last.

`docs/reference/warmset.md` derives the rule. The native twin is
`kernels/src/decision/warmset.cpp`: functions and constants of the same names, in the same order,
with the same results to the last bit. The router decides by the twin and explains by this file, so
a change of either is a change of both.
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
    """KV memory of the workers, and the demand of sessions for it. Lifetime: one decision."""

    wanted_tokens: Floats  # tokens that sessions at home there will want again
    needed_tokens: Floats  # the same with this request's session
    size_tokens: Floats  # tokens that the worker's caches keep
    redo_token_s: Floats  # seconds to compute one wanted token again
    holding_pays: bool  # waiting for room in a cache saves more than it costs
    caches_last: bool  # a cache is still there when its session returns


@dataclass(frozen=True, slots=True)
class Warmset:
    """Cost in seconds: what the request waits, and what it does to others, on each worker.

    cost = queue + prefill + memory_wait + delay_to_others + running + pushed_out + place + evicted

    A new or cold session costs +inf where its cache would not last (`_is_open`); +inf everywhere
    makes it wait at the router. Hits that are unknown count as they are; an unknown KV capacity
    counts as the median of the others'. Spill depth of H of P seconds, without a queue:
    H / (P - H + step / 2) / `running` requests.

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
        seconds = self.terms(request, fleet, state)
        over_tokens = seconds.pop("over_tokens")
        closed = np.where(over_tokens > 0.0, np.inf, 0.0)
        costs: Floats = sum(seconds.values(), start=closed)
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the terms of the cost in seconds, and `over_tokens`.

        A worker whose `over_tokens` is above 0 is closed to the request: the cost is +inf.
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
        """float64[rows]: seconds that the worker's unfinished requests wait for this one, weighted.

        They get no token while its prefill is computed. The half step, of the pool's median, stands
        for the steps that they share with it; it also spreads prompts that are cached as a whole.
        """
        delay_s = own_s + 0.5 * median(fleet.step_s)
        seconds: Floats = self.running * fleet.requests * delay_s
        return seconds

    def _place_warm(
        self, request: RequestView, fleet: FleetView, memory: Memory, seconds: dict[str, Floats]
    ) -> dict[str, Floats]:
        """Return all terms for a warm session, dearer on workers without its cache.

        A session that will surely return pays `stay` times as much there. No worker is closed.
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
        """Return all terms for a new or cold session, which pays for the memory of its cache."""
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
        """bool[rows] or True for all: workers where a new or cold session may start.

        `again_s`: seconds to compute its private tokens.
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
        """bool[rows]: the workers whose memory a session that waited exceeds least.

        None of them, unless the pool as a whole has room, no cache could ever hold the session, or
        it is cold and waited for long.
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
    """The memory of each worker, what sessions want of it, and if caches are worth waiting for.

    They are if a full cache saves more seconds of prefill than a session's turn (`cycle_s`) takes.
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
    """float64[rows]: seconds to compute again what this request pushes out of others' caches.

    At most its own private tokens, and nothing if caches do not last anyway.
    """
    most = request.private_tokens * memory.caches_last
    tokens = between(memory.needed_tokens - FULL * memory.size_tokens, most)
    return tokens * memory.redo_token_s
