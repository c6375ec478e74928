"""One decision; the eligible workers, their costs by the policy, and the one that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np

from kvkernels import PrefixIndex
from policies.contract import FleetView, Floats, Hashes, Ints, RequestView
from policies.facts import Arrival
from policies.record import record
from router.core.contract.actions import Decision, Details, Ranking, Reject, details_of
from router.core.contract.settings import NO_LIMIT, CoreSettings
from router.core.placement.admission import ModelLimits
from router.core.placement.eligible import Eligibility, Rows, Unheard
from router.core.placement.guard import Answer, PolicyGuard
from router.core.placement.hold_queue import Pending, most_s
from router.core.placement.live_fleet import LiveFleet
from router.core.placement.reservations import Reservations
from router.core.placement.session_tracking import SessionTracking
from router.core.placement.worker_caches import WorkerCaches
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import NO_LOADS, Loads
from router.core.workers.table import Worker, WorkerTable

_FILLED = 0.95  # of a cache: beyond it engines preempt what runs


def tier_hits(
    index: PrefixIndex,
    rows: Rows,
    chains: Mapping[int, Hashes],
    prompt_tokens: int,
    hit_tokens: Ints,
    confidence: Floats | None = None,
) -> tuple[Ints, Ints]:
    """(host, disk), each int64[rows]: further leading prompt tokens, beyond `hit_tokens`.

    `confidence`: share of each row's that counts. A block counts in the highest tier that holds all
    before it too: host tokens go on where the GPU's end, disk tokens where those end. At least one
    token of the prompt is left to compute.
    """
    reach = np.zeros((2, len(rows)), dtype=np.int64)  # up to where host, and disk, would do
    own_sizes = np.array(rows.block_sizes)
    for size in rows.distinct_block_sizes:
        blocks = index.longest_prefix_tiers(chains[size])[1:, rows.slots]
        np.multiply(blocks, size, out=reach, where=own_sizes == size, dtype=np.int64)
    np.minimum(reach, max(prompt_tokens - 1, 0), out=reach)
    if confidence is not None:
        reach = (reach * confidence).astype(np.int64)
    host = np.maximum(reach[0] - hit_tokens, 0)
    disk = np.maximum(reach[1] - np.maximum(reach[0], hit_tokens), 0)
    return host, disk


def _kv_tokens(pending: Pending) -> int:
    """Tokens of KV for which a worker must have room before it is chosen: none where the engine
    itself lets a prompt wait. A prefill for a worker without room fills another one's cache.
    """
    return pending.arrival.prompt_tokens if pending.leg == "decode" else 0


class WorkerLimits:
    """Lifetime: process."""

    def __init__(self, settings: CoreSettings, columns: WorkerColumns) -> None:
        self._requests = settings.worker_requests
        self._queued_tokens = settings.worker_queued_tokens
        self._columns = columns
        self._any = min(self._requests, self._queued_tokens) < NO_LIMIT
        self._latest: tuple[Rows, bytes, Rows | None] | None = None  # asked for, full, answered

    def rows(self, rows: Rows, kv_tokens: int = 0) -> Rows | None:
        """Those of `rows` that are below both limits, and have room for so many tokens of KV; None:
        nobody has.
        """
        if not (self._any or kv_tokens):
            return rows
        slots, columns = rows.slots, self._columns
        full = columns.requests[slots] >= self._requests
        if self._queued_tokens < NO_LIMIT:
            full |= columns.queued_tokens(slots) >= self._queued_tokens
        if kv_tokens:
            filled = columns.kv_used_tokens(slots) + kv_tokens
            crowded = filled > _FILLED * columns.kv_capacity_tokens[slots]  # unknown: False
            full |= crowded & (columns.requests[slots] > 0)
        if not full.any():
            return rows
        key, latest = np.packbits(full).tobytes(), self._latest
        if latest is None or latest[0] is not rows or latest[1] != key:
            left = [rows.workers[place] for place in np.flatnonzero(~full).tolist()]
            latest = self._latest = rows, key, Rows.of(left) if left else None
        return latest[2]


@record
class Choice:
    """A worker, and why."""

    worker: Worker
    decision: Decision
    loads: Loads = NO_LOADS  # what it will load of the prompt

    @property
    def uncached_tokens(self) -> int:
        """What it must compute of the prompt: at least the last token, for its logits."""
        decision = self.decision
        return max(decision.prompt_tokens - decision.hit_tokens - self.loads.tokens, 1)


@record
class Withheld:
    """No worker, for now: by which policy, and what that saw."""

    policy: str
    details: Details
    limit: str = ""  # of its model, which it met before the policy was asked


class Chooser:
    """Eligibility, then the policy or what stands in for it (`guard`). Lifetime: process."""

    def __init__(
        self,
        guard: PolicyGuard,
        settings: CoreSettings,
        columns: WorkerColumns,
        workers: WorkerTable,
        caches: WorkerCaches,
        arrivals: ArrivalEstimator,
        session_tracking: SessionTracking,
        model_limits: ModelLimits,
        explains_all: bool,
    ) -> None:
        """`explains_all`: every decision keeps what it saw, not those of `explained` alone."""
        self._guard = guard
        self._settings = settings
        self._columns = columns.read_only()
        self._workers = workers
        self._eligibility = Eligibility(workers, settings.panic_share)
        self._caches = caches
        self._arrivals = arrivals
        self.explains_all = explains_all
        self.explained: set[int] = set()  # requests whose decisions somebody reads
        self._session_tracking = session_tracking
        self.reservations = Reservations(columns)
        self._limits = WorkerLimits(settings, columns)
        self._model_limits = model_limits

    def choose(self, pending: Pending, now_s: float, reason: str) -> Choice | Reject | None:
        """The worker to take the request, a refusal, or None: hold it.

        Raises FallbackError where even the fallback fails.
        """
        arrival, able = pending.arrival, self._eligibility.rows(pending)
        if isinstance(able, Reject):
            return able
        if isinstance(able, Unheard):
            return None
        rows = self._limits.rows(able, _kv_tokens(pending))
        if rows is None or self._model_limits.reached(pending):
            return None
        request, fleet = self._views(pending, rows, now_s)
        if self.reservations.models and (free := self.reservations.rows(pending, rows)) is not rows:
            if free is None:
                return None
            rows = free
            request, fleet = self._views(pending, rows, now_s)
        if (few := self._without_slow_starters(pending, rows, fleet, now_s)) is not rows:
            views = self._views(pending, few, now_s)
            answer = self._guard.decide(*views)
            if answer[2] >= 0:
                return self._chosen(arrival, few, *views, answer, reason)
        answer = self._guard.decide(request, fleet)
        if answer[2] < 0:
            self.reservations.refused(pending, rows, fleet.hit_tokens, now_s)
            return None
        return self._chosen(arrival, rows, request, fleet, answer, reason)

    def explain(self, pending: Pending, now_s: float, reason: str) -> Choice | Withheld | Reject:
        """The same for somebody who only wants to know, with its details. Nobody is judged by it.

        Raises FallbackError as well.
        """
        able = self._eligibility.rows(pending)
        if isinstance(able, Reject):
            return able
        unheard = ""
        if isinstance(able, Unheard):
            unheard, able = "most of its workers are silent", able.rows
        below = self._limits.rows(able, _kv_tokens(pending))
        rows = able if below is None else below
        request, fleet = self._views(pending, rows, now_s)
        free = self.reservations.rows(pending, rows)  # None: all are reserved for others
        if free is not None and free is not rows:
            rows = free
            request, fleet = self._views(pending, rows, now_s)
        if (few := self._without_slow_starters(pending, rows, fleet, now_s)) is not rows:
            views = self._views(pending, few, now_s)
            if self._guard.consult(*views)[2] >= 0:
                rows, (request, fleet) = few, views
        answer = self._guard.consult(request, fleet)
        details = self._details(request, fleet, answer)
        limit = unheard or self._model_limits.reached(pending)
        if answer[2] < 0 or free is None or below is None or limit:
            return Withheld(answer[0].name, details, limit)
        choice = self._choice(rows, request, fleet, answer, reason)
        choice.decision.details = details
        return choice

    def has_room(self, pending: Pending) -> bool:
        """Whether a worker that is not busy may take the request, or this leg of it."""
        return self._eligibility.has_room(pending)

    def may_have_model(self, pending: Pending) -> bool:
        """True if a worker that has the model may take the request."""
        return self._eligibility.may_have_model(pending)

    def missing_tokens(self, pending: Pending) -> int:
        """Tokens of a prompt that even the best worker would have to compute; at least 1."""
        arrival, rows = pending.arrival, self._eligibility.rows(pending)
        if isinstance(rows, Reject):
            return max(arrival.prompt_tokens, 1)
        if isinstance(rows, Unheard):
            rows = rows.rows
        hits = self._caches.hit_tokens(rows, arrival.chains, arrival.prompt_tokens)
        return max(arrival.prompt_tokens - int(hits.max()), 1)

    def modelled_rate(self, model: str) -> float:
        """Tokens a second that the workers of a model should prefill together, by calibration."""
        rates, able = self._columns.prefill_tokens_per_s, self._workers.serving(model)
        return sum(float(rates[worker.slot]) for worker in able if worker.takes_requests)

    def _without_slow_starters(
        self, pending: Pending, rows: Rows, fleet: FleetView, now_s: float
    ) -> Rows:
        """Those that may be chosen while others start slowly."""
        slow_start = self._caches.slow_start
        return (
            slow_start.rows(pending.serial, rows, fleet.hit_tokens, now_s) if slow_start else rows
        )

    def _chosen(
        self,
        arrival: Arrival,
        rows: Rows,
        request: RequestView,
        fleet: FleetView,
        answer: Answer,
        reason: str,
    ) -> Choice:
        choice = self._choice(rows, request, fleet, answer, reason)
        if self.explains_all or arrival.request_id in self.explained:
            choice.decision.details = self._details(request, fleet, answer)
        return choice

    def _choice(
        self, rows: Rows, request: RequestView, fleet: FleetView, answer: Answer, reason: str
    ) -> Choice:
        policy, costs, row = answer
        unit, hits = None, fleet.hit_tokens
        if policy is not self._guard.policy:
            reason = "fallback"
        else:
            unit = self._guard.unit
            if reason == "policy" and len(rows.workers) == 1:
                reason = "only_worker"
        decision = Decision(
            policy.name,
            reason,
            hits.item(row),
            request.prompt_tokens,
            Ranking(rows.worker_ids, costs.copy(), hits, row),
            request.approximate,
            unit,
        )
        if self._caches.index.tiers == 1:
            return Choice(rows.workers[row], decision)
        loads = Loads(fleet.hit_tokens_host.item(row), fleet.hit_tokens_disk.item(row))
        decision.loaded_tokens = loads.tokens
        return Choice(rows.workers[row], decision, loads)

    def _details(self, request: RequestView, fleet: FleetView, answer: Answer) -> Details:
        policy, costs, row = answer
        costs = costs.copy()  # the policy may use its array again for its terms
        by_itself = policy is self._guard.policy
        terms = self._guard.terms(request, fleet) if by_itself else {}
        return details_of(request, fleet, costs, row, terms)

    def _views(self, pending: Pending, rows: Rows, now_s: float) -> tuple[RequestView, FleetView]:
        arrival = pending.arrival
        hits = self._caches.hit_tokens(rows, arrival.chains, arrival.prompt_tokens)
        size = rows.block_sizes[0]
        below_gpu = self._below_gpu(arrival, rows, hits)
        sessions = None
        if pending.tracked is not None:
            # What was evicted to a lower tier is not lost: it costs a load.
            held = hits if below_gpu is None else hits + sum(below_gpu())
            sessions = self._session_tracking.view(pending, rows, hits, held)
        request = RequestView(
            chain=arrival.chains[size],
            block_size=size,
            prompt_tokens=arrival.prompt_tokens,
            now_s=now_s,
            draw=pending.draw,
            serial=pending.serial,
            approximate=arrival.approximate,
            session=arrival.session,
            tenant=arrival.tenant,
            priority=arrival.priority,
            held_s=now_s - arrival.now_s if pending.held else 0.0,
            may_wait_s=max(most_s(arrival, self._settings.hold_s) - (now_s - arrival.now_s), 0.0),
            standing="new" if sessions is None else sessions.standing,
            return_chance=0.0 if sessions is None else sessions.return_chance,
            home_id=-1 if sessions is None else sessions.home_id,
            trunk_tokens=0 if sessions is None else sessions.trunk_tokens,
        )
        fleet = LiveFleet(
            self._columns,
            rows,
            hits,
            now_s,
            self._caches.others_s,
            self._settings.signal_stale_s,
            self._arrivals,
            below_gpu,
            sessions,
        )
        return request, fleet

    def _below_gpu(
        self, arrival: Arrival, rows: Rows, hits: Ints
    ) -> Callable[[], tuple[Ints, Ints]] | None:
        """Looks up the hits of lower tiers, once, where somebody asks; None: there are none."""
        index = self._caches.index
        if index.tiers == 1:
            return None
        discounts = self._caches.confidence.discounted
        confidence = self._columns.hit_confidence[rows.slots] if discounts else None
        asked = (arrival.chains, arrival.prompt_tokens, hits, confidence)
        return cache(partial(tier_hits, index, rows, *asked))
