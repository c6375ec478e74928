"""The present state of the fleet as columns, with the hit share of the last minute.

Rows are in the order of `rows`. Numbers are whole if possible; -1 means unknown.
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

_FADE_S = 60.0  # time constant of the fading: older decisions count less


class RecentHits:
    """Sums hit tokens and prompt tokens by worker slot; older decisions count less. Once a second,
    `look` reads the decisions made since the last call, at most 1,000; if more were made, it reads
    a sample of them. Lifetime: process.
    """

    def __init__(self, core: RouterCore, decisions: LatestAttempts) -> None:
        slots = len(core.columns.worker_id)
        self._core = core
        self._decisions = decisions
        self._seen = decisions.added
        self._worker_id = np.full(slots, -1, dtype=np.int64)  # whose sums a slot has
        self._hit_tokens = np.zeros(slots)
        self._prompt_tokens = np.zeros(slots)
        self._silent_s = np.zeros(slots)  # since the last dispatch to the slot

    def look(self, elapsed_s: float) -> None:
        """Add the decisions made since the last call, which was `elapsed_s` seconds ago."""
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
        """Return for each slot the expected share of prompt tokens that were cached, 0..1, as
        float64[slots]. NaN means that nothing was sent to the worker lately.
        """
        tokens = np.where(self._worker_id[slots] == worker_ids, self._prompt_tokens[slots], 0.0)
        known = (tokens >= 1.0) & (self._silent_s[slots] <= _FADE_S)
        shares = np.full(len(slots), np.nan)
        np.divide(self._hit_tokens[slots], tokens, out=shares, where=known)
        return shares


_MAX_MODELS = 8  # most models of a worker that are shown; it may have hundreds of adapters
_MAX_TRUNKS = 12

Row = tuple[Member, Worker | None]


def rows(core: RouterCore, members: list[Member]) -> list[Row]:
    """Return each worker of the fleet with the core's entry for it. The entry is None until the
    worker's engine is recognized.
    """
    return [(member, core.workers.get(member.worker_id)) for member in members]


def columns(core: RouterCore, fleet: list[Row], hits: RecentHits, now_s: float) -> dict[str, Any]:
    """Return the present state and load of each worker as columns. The columns `kv` and `hits` are
    in thousandths.
    """
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
    # No request can hit the cache of a worker that is down.
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
    """Return the objects that `names` reads; while these objects are the same, the result of
    `names` is the same, too.
    """
    return [(m.spec, m.recognized, None if w is None else w.facts) for m, w in fleet]


def names(fleet: list[Row]) -> list[list[Any]]:
    """Return for each worker the fields that seldom change: id, URL, rank, engine, models, number
    of models, role and KV tokens.
    """
    return [
        [
            member.worker_id,
            member.spec.url,
            member.spec.rank,
            member.kind,
            () if worker is None else worker.facts.models[:_MAX_MODELS],
            0 if worker is None else len(worker.facts.models),
            None if worker is None else worker.facts.role,
            None if worker is None else _tokens(worker.facts.kv_capacity_tokens),
        ]
        for member, worker in fleet
    ]


def exactness(fleet: list[Row], hits: WorkerHits | None) -> dict[str, Any]:
    """Return the distinct verdicts on how exact hits are, and for each row the number of its
    verdict.
    """
    kinds: dict[HitVerdict, int] = {}
    rows: list[int] = []
    for member, worker in fleet:
        verdict = None if hits is None else hits.of(member, worker)
        rows.append(-1 if verdict is None else kinds.setdefault(verdict, len(kinds)))
    return {"kinds": [one.shown() for one in kinds], "rows": rows}


def trunks(core: RouterCore, fleet: list[Row]) -> dict[str, Any]:
    """Return the prompt beginnings (trunks) with the greatest demand. In `holders`, a hexadecimal
    number has one bit for each row of the fleet, the highest bit first. `followed` is false if the
    policy does not use sessions.
    """
    sessions = core.session_tracking.sessions
    if sessions is None:
        return {"followed": False, "kept": 0, "rows": []}
    slots = np.array([-1 if w is None else w.slot for _, w in fleet], dtype=np.int64)
    shown = []
    for trunk in sessions.trunks.table()[:_MAX_TRUNKS]:
        held = core.caches.holders(trunk.last_hash)[slots] & (slots >= 0)
        holders = np.packbits(held).tobytes().hex()
        shown.append(trunk_shown(trunk, int(np.count_nonzero(held))) | {"holders": holders})
    return {"followed": True, "kept": len(sessions.trunks), "rows": shown}


def _state(
    member: Member, worker: Worker | None, slow_start: SlowStart | None, now_s: float
) -> str:
    """Return a worker's state as the page shows it: the state in `/workers`, or "joining",
    "leaving" or "slow_start".
    """
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
    """Return "1" if the worker's cache is known exactly, "0" if only a lower bound is known, and
    "-" if the worker sends no KV events.
    """
    if worker is None or not worker.has_usable_events:
        return "-"
    return "1" if worker.kv.known else "0"


def _whole(values: Floats | Ints, there: np.ndarray) -> list[int]:
    """Return the values rounded to 0..10^15, which JavaScript holds exactly; -1 means unknown."""
    known = there & np.isfinite(values)
    plain = np.clip(np.where(known, values, 0), 0, 1e15)
    whole: list[int] = np.where(known, np.rint(plain), -1).astype(np.int64).tolist()
    return whole


def _tokens(count: float) -> int | None:
    return int(count) if math.isfinite(count) else None
