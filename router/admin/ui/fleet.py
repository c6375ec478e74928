"""The fleet of this second as columns, with the hit share of the last minute.

Rows stand in the order of `rows`, numbers are whole where they can be, -1 is what nobody knows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from policies.contract import Floats, Ints
from router.admin.views.rows import trunk_shown
from router.core.core import RouterCore
from router.core.placement.health import SlowStart
from router.core.workers.hit_modes import HitVerdict
from router.core.workers.table import Worker
from router.fleet.member import Member
from router.record.request_record import LatestAttempts
from router.request.worker_hits import WorkerHits

_FADE_S = 60.0  # time constant: what is older counts less and less


class RecentHits:
    """Sums by worker slot that fade. Lifetime: process.

    Looks once a second at the decisions kept since, at most 1,000: of more it sees a sample.
    """

    def __init__(self, core: RouterCore, decisions: LatestAttempts) -> None:
        slots = len(core.columns.worker_id)
        self._core = core
        self._decisions = decisions
        self._seen = decisions.added
        self._worker_id = np.full(slots, -1, dtype=np.int64)  # whose sums a slot has
        self._hit_tokens = np.zeros(slots)
        self._prompt_tokens = np.zeros(slots)
        self._silent_s = np.zeros(slots)  # since something was sent there

    def look(self, elapsed_s: float) -> None:
        """Take in what was decided since the last look, `elapsed_s` ago."""
        fade = math.exp(-elapsed_s / _FADE_S)
        self._hit_tokens *= fade
        self._prompt_tokens *= fade
        self._silent_s += elapsed_s
        workers = self._core.workers
        for record in self._decisions.latest(self._decisions.added - self._seen):
            worker, decision = workers.get(record.worker_id), record.decision
            if worker is None:
                continue
            slot = worker.slot
            if self._worker_id[slot] != worker.worker_id:
                self._worker_id[slot] = worker.worker_id
                self._hit_tokens[slot] = self._prompt_tokens[slot] = 0.0
            self._hit_tokens[slot] += decision.hit_tokens
            self._prompt_tokens[slot] += decision.prompt_tokens
            self._silent_s[slot] = 0.0
        self._seen = self._decisions.added

    def shares(self, slots: Ints, worker_ids: Ints) -> Floats:
        """float64[slots]: 0..1 of what was expected to be there; NaN: nothing was sent lately."""
        tokens = np.where(self._worker_id[slots] == worker_ids, self._prompt_tokens[slots], 0.0)
        known = (tokens >= 1.0) & (self._silent_s[slots] <= _FADE_S)
        shares = np.full(len(slots), np.nan)
        np.divide(self._hit_tokens[slots], tokens, out=shares, where=known)
        return shares


_MODELS = 8  # named of a worker, which may have hundreds of adapters
_TRUNKS = 12

Row = tuple[Member, Worker | None]


def rows(core: RouterCore, members: list[Member]) -> list[Row]:
    """Each worker as its shell and, once it is recognized, as the core knows it."""
    return [(member, core.workers.get(member.worker_id)) for member in members]


def columns(core: RouterCore, fleet: list[Row], hits: RecentHits, now_s: float) -> dict[str, Any]:
    """What each worker does now; `kv` and `hits` are thousandths."""
    states: dict[str, int] = {}
    slow_start = core.caches.slow_start if core.caches.slow_start else None
    state = [states.setdefault(_state(*row, slow_start, now_s), len(states)) for row in fleet]
    slots = np.array([-1 if w is None else w.slot for _, w in fleet], dtype=np.int64)
    ids = np.array([member.worker_id for member, _ in fleet], dtype=np.int64)
    there = slots >= 0
    slots[~there] = 0
    table = core.columns
    queued = table.queued_tokens(slots)
    wait_s = (table.charged_work[slots] - table.drained_work[slots]) / np.maximum(
        table.prefill_tokens_per_s[slots], 1e-9
    )
    kv = table.kv_reported_tokens[slots]
    used = np.where(np.isfinite(kv), kv, table.context_tokens[slots] + queued)
    share = used / np.maximum(table.kv_capacity_tokens[slots], 1.0)
    # One that is down has no cache that anybody could hit.
    gone = np.array([w is not None and w.state == "down" for _, w in fleet], dtype=bool)
    numbers: dict[str, Floats | Ints] = {
        "requests": table.requests[slots],
        "waiting": table.waiting[slots],
        "queued_tokens": queued,
        "wait_ms": wait_s * 1e3,
        "context_tokens": table.context_tokens[slots],
        "kv": share * 1e3,
        "hits": np.where(gone, np.nan, hits.shares(slots, ids) * 1e3),
    }
    return {
        "states": list(states),
        "state": state,
        "index": "".join(_index(worker) for _, worker in fleet),
        **{name: _whole(values, there) for name, values in numbers.items()},
    }


def roots(fleet: list[Row]) -> list[tuple[object, ...]]:
    """What `names` come of: while these are the same objects, the names are the same, too."""
    return [(m.spec, m.recognized, None if w is None else w.facts) for m, w in fleet]


def names(fleet: list[Row]) -> list[list[Any]]:
    """What changes seldom: id, URL, rank, engine, models, how many models, role, KV tokens."""
    return [
        [
            member.worker_id,
            member.spec.url,
            member.spec.rank,
            member.kind,
            () if worker is None else worker.facts.models[:_MODELS],
            0 if worker is None else len(worker.facts.models),
            None if worker is None else worker.facts.role,
            None if worker is None else _tokens(worker.facts.kv_capacity_tokens),
        ]
        for member, worker in fleet
    ]


def exactness(fleet: list[Row], hits: WorkerHits | None) -> dict[str, Any]:
    """Return the distinct verdicts on how exact hits are, and the place in them of each row's."""
    kinds: dict[HitVerdict, int] = {}
    rows: list[int] = []
    for member, worker in fleet:
        verdict = None if hits is None else hits.of(member, worker)
        rows.append(-1 if verdict is None else kinds.setdefault(verdict, len(kinds)))
    return {"kinds": [one.shown() for one in kinds], "rows": rows}


def trunks(core: RouterCore, fleet: list[Row]) -> dict[str, Any]:
    """The trunks with the greatest demand; `holders` has a bit a row, in hex, the first is highest.

    `followed` is false where the policy does not ask about sessions.
    """
    sessions = core.session_tracking.sessions
    if sessions is None:
        return {"followed": False, "kept": 0, "rows": []}
    slots = np.array([-1 if w is None else w.slot for _, w in fleet], dtype=np.int64)
    shown = []
    for trunk in sessions.trunks.table()[:_TRUNKS]:
        held = core.caches.holders(trunk.last_hash)[slots] & (slots >= 0)
        holders = np.packbits(held).tobytes().hex()
        shown.append(trunk_shown(trunk, int(np.count_nonzero(held))) | {"holders": holders})
    return {"followed": True, "kept": len(sessions.trunks), "rows": shown}


def _state(
    member: Member, worker: Worker | None, slow_start: SlowStart | None, now_s: float
) -> str:
    """As `/workers` has it, but that leaving is a state, and so is to ramp."""
    if worker is None:
        return "joining"
    if member.leaving:
        return "leaving"
    state = worker.shown_state
    if (
        slow_start is not None
        and state == "ready"
        and slow_start.share(worker.worker_id, now_s) < 1.0
    ):
        return "slow_start"
    return state


def _index(worker: Worker | None) -> str:
    """Whether the worker's cache is known: 1 yes, 0 a lower bound, - it publishes no events."""
    if worker is None or not worker.tells:
        return "-"
    return "1" if worker.kv.known else "0"


def _whole(values: Floats | Ints, there: np.ndarray) -> list[int]:
    """Rounded, not below 0, no more than JavaScript has exactly; -1: not known."""
    known = there & np.isfinite(values)
    plain = np.clip(np.where(known, values, 0), 0, 1e15)
    whole: list[int] = np.where(known, np.rint(plain), -1).astype(np.int64).tolist()
    return whole


def _tokens(count: float) -> int | None:
    return int(count) if math.isfinite(count) else None
