"""The present problems for an operator: each problem's worker, reason, duration, and heading in
docs/operations.md.

Draining, leaving, sleeping and busy workers are no problems: an operator wants the first three, and
a busy worker recovers by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from router.admin.ui.samples import CLIENT_CODES, FULL_CODES
from router.core.core import RouterCore
from router.core.workers.table import Worker
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.metrics.registry import RouterMetrics
from router.request.service import Service
from router.server.client_port import readiness

Rows = Callable[[], list[dict[str, Any]]]


class Kind(NamedTuple):
    """One kind of problem: its title, its place in the runbook, and how long it must last to be
    shown. Lifetime: process.
    """

    title: str
    runbook: str  # the heading of docs/operations.md that says what to do
    after_s: float = 0.0  # it is shown once it has lasted for so long


# The worst first. What may pass by itself within seconds is given the time to do so.
KINDS: dict[str, Kind] = {
    "unready": Kind("The router is not ready", "WarmrouteNoWorker", 3.0),
    "panic": Kind("Most workers of a model answer no probe", "WarmroutePanic"),
    "defect": Kind("The router itself failed requests", "WarmrouteOurErrors"),
    "out_of_files": Kind("The router may open no more files", "WarmrouteOutOfFiles"),
    "saturated": Kind("Requests are refused for want of room", "WarmrouteSaturated"),
    "waiting": Kind("Requests wait at the router", "WarmrouteSaturated"),
    "refused": Kind("Requests are refused or fail", "WarmrouteBudgetBurn"),
    "failing": Kind("Answers fail at workers", "WarmrouteBudgetBurn"),
    "policy": Kind("The policy is suspended", "WarmroutePolicySuspended"),
    "down": Kind("Worker is down", "WarmrouteWorkerDown"),
    "silent": Kind("Worker answers no probe", "WarmrouteWorkerDown"),
    "ejected": Kind("Worker is ejected", "WarmrouteWorkerEjected"),
    "unrecognized": Kind("Worker is not recognized", "When something fails", 3.0),
    "hot": Kind("One worker has most of the load", "WarmrouteHotSpot", 30.0),
    "events_lost": Kind("KV events do not come", "WarmrouteKvUnknown", 3.0),
    "events_missed": Kind("KV events were missed", "WarmrouteKvUnknown", 60.0),
    "events_useless": Kind("KV events are of no use", "WarmrouteKvEventsUseless"),
    "refuted": Kind("Hits are not found", "Wrong reports from engines"),
    "index": Kind("The router forgets cached blocks", "WarmrouteIndexTooSmall"),
    "source": Kind("A source of workers fails", "WarmrouteDiscoveryDown"),
    "replicas": Kind("The link to the other routers is down", "WarmrouteReplicaStale"),
}
_MINUTE_S = 60.0
_ROWS = 8  # most problems of one kind that are shown at once
_CHARS = 200  # longest reason that is shown, characters
_MAX_REASONS = 100  # most workers whose table cell shows the reason
_WAIT_S = 30.0  # wait from which a held request is a problem, seconds
_FAILING = (5, 0.01)  # attempts that fail in a minute: so many at least, and more than this share
_HOT = (3.0, 0.9, 8)  # times the mean, at most this share of the pool; requests
_CONFIDENT = 0.9  # below it, workers report fewer hits than KV events promise
_INTENDED = frozenset({"draining", "shutting_down"})  # refusals that an operator asked for
_FULL = FULL_CODES | {"worker_wait_full"}
_REFUSAL_HINTS = {
    "router_full": "the router has as many open requests as limits.inflight_requests allows",
    "hold_queue_full": "as many requests wait as limits.hold_requests allows",
    "hold_timeout": "no worker could take them within limits.hold_s",
    "displaced": "more important requests took their places in the queue",
    "worker_wait_full": "as many requests wait for a first worker as waiting.requests allows",
    "no_worker_available": "the pool has no ready worker of the model",
    "worker_error": "each worker that the router tried failed",
    "retry_budget_exhausted": "a worker failed, and the retry budget is used up",
    "deadline_exceeded": "the requests' deadlines passed",
}

Key = tuple[str, str | int]  # kind; worker id, or what it is about


class Problems:
    """Finds all present problems once a second, and keeps the time at which each began. Lifetime:
    process.
    """

    def __init__(
        self,
        core: RouterCore,
        service: Service,
        fleet: FleetManager,
        metrics: RouterMetrics,
        sources: Rows = list,
        replicas: Rows = list,
    ) -> None:
        """Look for problems in these parts of the router. `sources` returns rows of the parts that
        name workers, and `replicas` returns rows of the routers that share state.
        """
        self.sources = sources
        self.replicas = replicas
        self._core = core
        self._service = service
        self._fleet = fleet
        self._metrics = metrics.requests
        self._minute: deque[tuple[float, Counter[str]]] = deque()
        self._since: dict[Key, float] = {}
        self._judged: tuple[int, bool] | None = None  # the versions for which `_reasons` are valid
        self._reasons: list[str] = []
        self._why: dict[Key, str] = {}  # reasons of problems that concern no single worker

    def look(self, now_s: float) -> None:
        """Find the present problems. A problem that the last call found, too, keeps the time at
        which it began.
        """
        self._why = dict(self._of_router(now_s))
        found: list[Key] = [*self._why, *self._of_workers()]
        self._since = {key: self._since.get(key, now_s) for key in found}

    def shown(self, now_s: float) -> dict[str, Any]:
        """Return for JSON the kinds of problems, the worst first, each with its first rows. Also
        return, by worker id, the reason why a worker does not take requests or is not used as it
        should be.
        """
        kinds: dict[str, list[Key]] = {kind: [] for kind in KINDS}
        for key, since_s in self._since.items():
            if now_s - since_s >= KINDS[key[0]].after_s:
                kinds[key[0]].append(key)
        wrong = [
            {
                "kind": kind,
                "title": KINDS[kind].title,
                "runbook": KINDS[kind].runbook,
                "count": len(keys),
                "rows": [self._row(key, now_s) for key in self._oldest(keys)],
            }
            for kind, keys in kinds.items()
            if keys
        ]
        return {"wrong": wrong, "troubles": self._troubles(kinds, now_s)}

    def _oldest(self, keys: list[Key]) -> list[Key]:
        return sorted(keys, key=lambda key: self._since[key])[:_ROWS]

    def _row(self, key: Key, now_s: float) -> dict[str, Any]:
        member = None if isinstance(key[1], str) else self._fleet.members.get(key[1])
        why = self._why[key] if key in self._why else self._worker_why(key, now_s)
        return {
            "worker": None if member is None else member.worker_id,
            "where": str(key[1])[:_CHARS] if member is None else member.spec.name,
            "why": why[:_CHARS],
            "for_s": round(now_s - self._since[key], 1),
        }

    def _troubles(self, kinds: dict[str, list[Key]], now_s: float) -> dict[str, str]:
        told: dict[str, str] = {}
        for keys in kinds.values():
            for key in keys:
                if len(told) < _MAX_REASONS and isinstance(key[1], int):
                    told.setdefault(str(key[1]), self._worker_why(key, now_s)[:_CHARS])
        for worker_id, member in self._fleet.members.items():  # asleep, paused, draining
            worker = self._core.workers.get(worker_id)
            if len(told) < _MAX_REASONS and member.trouble and (worker is None or not worker.is_in):
                told.setdefault(str(worker_id), member.trouble[:_CHARS])
        return told

    def _of_router(self, now_s: float) -> Iterator[tuple[Key, str]]:
        """Yield the problems of the router itself, and of all workers together, each with its
        reason.
        """
        if reasons := self._not_ready():
            yield ("unready", ""), "; ".join(reasons)
        for model in sorted(self._core.health.silences.panics):
            yield ("panic", model), "nothing moves, and new requests wait"
        yield from self._of_minute(now_s)
        oldest_s = max((now_s - one.arrival.now_s for one in self._core.held), default=0.0)
        if oldest_s > _WAIT_S:
            many = f"{self._core.held_requests} wait, the oldest for {oldest_s:.0f} s"
            yield ("waiting", ""), many
        guard = self._core.guard
        if guard.suspension.active:
            fault = f": {guard.last_fault}" if guard.last_fault is not None else ""
            yield ("policy", guard.policy.spec), f"{guard.fallback.spec} decides instead{fault}"
        for one in self.sources():
            if one.get("trouble"):
                yield ("source", str(one["source"])), str(one["trouble"])
        rows = self.replicas()
        if rows and str(rows[0].get("state", "")).startswith("link down"):
            yield ("replicas", str(rows[0].get("name", ""))), str(rows[0]["state"])

    def _not_ready(self) -> list[str]:
        """Return the reasons why the workers make the router not ready.

        They are computed again only when the workers change, because it takes microseconds a
        worker.
        """
        told = (self._core.workers.version, self._service.promises())
        if told != self._judged:
            self._judged = told
            wanted = self._service.reasons()
            reasons = readiness(self._service)["reasons"]
            self._reasons = [why for why in reasons if why not in wanted]
        return self._reasons

    def _of_minute(self, now_s: float) -> Iterator[tuple[Key, str]]:
        """Yield the problems that counters show by their growth in the last minute."""
        totals = self._totals()
        self._minute.append((now_s, totals))
        while self._minute[0][0] < now_s - _MINUTE_S:
            self._minute.popleft()
        more = totals - self._minute[0][1]
        for code, count in sorted(more.items()):
            name, _, refused = code.partition(":")
            if refused:
                yield (
                    (name, refused),
                    f"{_counted(count)}: {_REFUSAL_HINTS.get(refused, 'see errors.md')}",
                )
        if more["defect"]:
            yield ("defect", ""), f"{_counted(more['defect'])}: the log has the stack of each"
        if more["index"]:
            yield ("index", ""), f"{more['index']} blocks in the last minute: its index is full"
        failed, tried = more["failed"], more["tried"]
        if failed >= _FAILING[0] and failed > _FAILING[1] * tried:
            yield ("failing", ""), f"{failed} of {tried} attempts in the last minute"

    def _totals(self) -> Counter[str]:
        """Return the present values of the counters; a refusal's key is `KIND:CODE`."""
        counters, totals = self._core.counters, Counter[str]()
        for code, count in counters.rejections.items():
            if code in _FULL:
                totals[f"saturated:{code}"] = count
            elif code == "out_of_files":
                totals[f"out_of_files:{code}"] = count
            elif code not in CLIENT_CODES and code not in _INTENDED:
                totals[f"refused:{code}"] = count
        totals["defect"] = self._metrics.internal_errors
        totals["failed"] = self._metrics.worker_errors
        totals["tried"] = counters.decisions.total()
        totals["index"] = self._core.caches.index.evicted
        return totals

    def _of_workers(self) -> Iterator[Key]:
        """Yield the problems that concern a single worker."""
        members, workers = self._fleet.members, self._core.workers
        doubted = set(np.flatnonzero(self._core.columns.hit_confidence < _CONFIDENT).tolist())
        well = [worker for worker in workers if worker.is_in]
        for worker in well:
            if worker.facts.has_events:
                kind = _events_kind(worker, worker.slot in doubted)
                if kind is not None:
                    yield kind, worker.worker_id
        if (hot := self._hot(well)) is not None:
            yield "hot", hot.worker_id
        if len(well) < len(members):
            for worker_id in members.keys() - {worker.worker_id for worker in well}:
                kind = _state_kind(members[worker_id], workers.get(worker_id))
                if kind is not None:
                    yield kind, worker_id

    def _hot(self, workers: list[Worker]) -> Worker | None:
        """Return the worker that has far more requests than the mean, or None."""
        if len(workers) < 2:
            return None
        requests = self._core.columns.requests[[worker.slot for worker in workers]]
        times, share, least = _HOT
        most = int(requests.argmax())
        limit = min(share * len(workers), times) * float(requests.mean())
        return workers[most] if requests[most] > max(limit, least) else None

    def _worker_why(self, key: Key, now_s: float) -> str:
        kind, worker_id = key
        member = self._fleet.members.get(worker_id) if isinstance(worker_id, int) else None
        worker = None if member is None else self._core.workers.get(member.worker_id)
        if member is None or worker is None:
            return "" if member is None else member.trouble
        if kind == "ejected":
            return _ejected_why(worker, now_s)
        if kind == "hot":
            requests = self._core.columns.requests
            mean = requests.sum() / max(self._service.ready_workers(), 1)
            return f"{requests[worker.slot]} requests, where the mean is {mean:.1f}"
        if kind in ("down", "silent", "unrecognized"):
            return member.trouble or "its probes fail"
        return _events_why(worker, float(self._core.columns.hit_confidence[worker.slot]))


def _counted(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'} in the last minute"


def _state_kind(member: Member, worker: Worker | None) -> str | None:
    """Return the kind of problem that keeps a worker from taking requests, or None if an operator
    wants the worker's state.
    """
    if worker is None:
        return "unrecognized" if member.trouble else None
    state = worker.shown_state
    if state == "trial":
        return "ejected"
    if state in ("ejected", "silent"):
        return state
    return "down" if state == "down" and member.state not in ("asleep", "paused") else None


def _events_kind(worker: Worker, doubted: bool) -> str | None:
    """Return the kind of problem with the router's knowledge of a worker's cache, or None if there
    is none.
    """
    kv = worker.kv
    if kv.guessed is not None:
        return "events_useless"
    if kv.unheard or kv.severed:
        return "events_lost"
    if not kv.known:
        return "events_missed"
    return "refuted" if doubted else None


def _events_why(worker: Worker, confidence: float) -> str:
    kv = worker.kv
    if kv.guessed is not None:
        return "none of them can be used: the router guesses its cache by its own requests"
    if kv.unheard or kv.severed:
        return "the connection to them is lost: its hits are a lower bound"
    if kv.evicted_blocks:
        return f"the router's index forgot {kv.evicted_blocks} of its blocks: limits.index_entries"
    if not kv.known:
        return (
            "they have not come again: its hits are a lower bound until its cache has turned over"
        )
    return f"answers find {confidence:.0%} of what its KV events promise"


def _ejected_why(worker: Worker, now_s: float) -> str:
    health = worker.health
    causes = ", ".join(f"{name} {count}" for name, count in health.causes.most_common(2))
    failed = f"too many requests failed there ({causes} so far)" if causes else "it failed"
    if health.state == "trial":
        return f"{failed}; it is on trial: one request at a time"
    return f"{failed}; it is probed again in {max(health.until_s - now_s, 0.0):.0f} s"
