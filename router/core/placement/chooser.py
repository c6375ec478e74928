"""Makes one decision: finds the eligible workers, gets their costs, and chooses a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, get_args

import numpy as np

from kvkernels import PrefixIndex
from policies.contract import FleetView, Floats, Hashes, Ints, RequestView
from policies.facts import Arrival, Role
from router.core.contract.actions import Decision, Details, Ranking, Reject, details_of
from router.core.contract.settings import NO_LIMIT, CoreSettings
from router.core.placement.admission import ModelLimits
from router.core.placement.choice import Choice, Held, Withheld
from router.core.placement.eligible import Eligibility, Group, Rows, SilentCandidates
from router.core.placement.guard import PolicyGuard, Verdict
from router.core.placement.hold_queue import most_s
from router.core.placement.live_fleet import LiveFleet
from router.core.placement.pending import Pending
from router.core.placement.reservations import Reservations
from router.core.placement.session_tracking import SessionTracking
from router.core.placement.worker_caches import WorkerCaches
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import NO_LOADS, Loads
from router.core.workers.table import WorkerTable

_FILLED = 0.95  # share of a KV cache: above it engines preempt running requests


def tier_hits(
    index: PrefixIndex,
    rows: Rows,
    chains: Mapping[int, Hashes],
    prompt_tokens: int,
    hit_tokens: Ints,
    confidence: Floats | None = None,
) -> tuple[Ints, Ints]:
    """Return the leading prompt tokens beyond `hit_tokens` that each worker holds in host memory
    and on disk, each int64[rows]. `confidence` is the share of each worker's hits that counts,
    0..1; None means that all hits count. A block counts in the highest tier that also holds all
    blocks before it: host tokens continue where the GPU's end, and disk tokens where the host's
    end. At least one token of the prompt is left to compute.
    """
    # The leading tokens that host memory, and the disk, could serve.
    reach = np.zeros((2, len(rows)), dtype=np.int64)
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


class WorkerLimits:
    """Finds the workers that are below the limits of requests, queued tokens and KV memory.

    The limits are settings of the router, the same for each worker. Lifetime: process.
    """

    def __init__(self, settings: CoreSettings, columns: WorkerColumns) -> None:
        self._requests = settings.worker_requests
        self._queued_tokens = settings.worker_queued_tokens
        self._columns = columns
        self._any = min(self._requests, self._queued_tokens) < NO_LIMIT
        # The last question (rows, full rows) and its answer.
        self._latest: tuple[Rows, bytes, Rows | None] | None = None

    def rows(self, rows: Rows, kv_tokens: int = 0) -> Rows | None:
        """Return the workers of `rows` that are below all limits, or None if there are none.

        If `kv_tokens` is above 0, a worker that has requests must also have room for this number of
        KV tokens.
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


# No worker can take a leg now.
_HELD: Mapping[Role, Held] = MappingProxyType({leg: Held(leg) for leg in get_args(Role)})


class Considered(NamedTuple):
    """The workers that a decision considered, their data, and the policy's choice among them."""

    rows: Rows
    request: RequestView
    fleet: FleetView
    verdict: Verdict | None  # None: the policy was not asked
    # The reason why the request is held whatever the policy chooses; "": without a text for people;
    # None: no such reason.
    obstacle: str | None


class Chooser:
    """Chooses a worker for a request: the eligible worker that the policy prefers.

    If the policy fails, the fallback policy decides (`guard`). Lifetime: process.
    """

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
        """Store the parts of the core that a decision reads.

        If `explains_all` is True, the details of every decision are recorded; otherwise only those
        of the requests in `explained`.
        """
        self._guard = guard
        self._settings = settings
        self._columns = columns.read_only()
        self._workers = workers
        self._eligibility = Eligibility(workers, settings.panic_share)
        self._caches = caches
        self._arrivals = arrivals
        self.explains_all = explains_all
        self.explained: set[int] = set()  # requests whose decisions an operator reads
        self._session_tracking = session_tracking
        self.reservations = Reservations(columns)
        self._limits = WorkerLimits(settings, columns)
        self._model_limits = model_limits

    def choose(
        self, pending: Pending, leg: Role, group: Group | None, now_s: float, reason: str
    ) -> Choice | Reject | Held:
        """Choose the worker for a request, or for its prefill or decode leg.

        Return `Reject` if the request must be refused, or `Held` if it must wait. `group` is the
        group of the other leg's worker, or the groups that may have the leg, or None for any.
        Raises FallbackError if both the policy and the fallback policy fail.
        """
        seen = self._decide(pending, leg, group, now_s, self._guard.decide)
        if not isinstance(seen, Considered):
            return _HELD[leg] if seen is None else seen
        rows, request, fleet, verdict, obstacle = seen
        # The place of a held request in the queue stays.
        if pending.tracked is not None and not pending.held:
            pending.standing = request.standing
        if verdict is None or obstacle is not None:
            return _HELD[leg]
        if verdict.row < 0:
            if not self._guard.passes_held:
                self.reservations.refused(pending, rows, fleet.hit_tokens, now_s)
            return _HELD[leg]
        choice = self._choice(rows, request, fleet, verdict, reason)
        if self.explains_all or pending.arrival.request_id in self.explained:
            choice.decision.details = self._details(request, fleet, verdict)
        return choice

    def explain(
        self, pending: Pending, leg: Role, group: Group | None, now_s: float, reason: str
    ) -> Choice | Reject | Withheld:
        """Return the decision for a request with its details, as a dry run.

        A fault of the policy in a dry run does not suspend the policy. Raises FallbackError if both
        the policy and the fallback policy fail.
        """
        seen = self._decide(pending, leg, group, now_s, self._guard.consult, explains=True)
        if isinstance(seen, Reject):
            return seen
        assert seen is not None, "it saw its workers"
        rows, request, fleet, verdict, obstacle = seen
        assert verdict is not None, "the policy was asked"
        details = self._details(request, fleet, verdict)
        if verdict.row < 0 or obstacle is not None:
            return Withheld(verdict.policy.name, details, obstacle or "")
        choice = self._choice(rows, request, fleet, verdict, reason)
        choice.decision.details = details
        return choice

    def _decide(
        self,
        pending: Pending,
        leg: Role,
        group: Group | None,
        now_s: float,
        ask: Callable[[RequestView, FleetView], Verdict],
        explains: bool = False,
    ) -> Considered | Reject | None:
        """Find the workers that may take the leg, and call `ask` for the policy's choice of one. An
        obstacle, such as a limit of the model, may keep the request from all workers. In this case
        the policy is called only if `explains` is True. Return None if the obstacle appears before
        the workers' data are read.
        """
        rows = self._eligibility.rows(pending, leg, group)
        if isinstance(rows, Reject):
            return rows
        obstacle: str | None = None
        if isinstance(rows, SilentCandidates):
            rows, obstacle = rows.rows, "most of its workers are silent"
        # A worker that decodes needs room for the prompt's KV: without it, the prefill at another
        # worker would only fill that one's cache. Other engines let a prompt wait for room.
        kv_tokens = pending.arrival.prompt_tokens if leg == "decode" else 0
        below = self._limits.rows(rows, kv_tokens)
        limit = self._model_limits.reached(pending)
        if below is None or limit:
            obstacle = obstacle or limit
        if obstacle is not None and not explains:
            return None
        rows = rows if below is None else below
        request, fleet = self._views(pending, rows, now_s)
        if self.reservations.models:
            standing = pending.standing if pending.held else request.standing
            free = self.reservations.rows(pending, standing, rows)
            if free is None:
                obstacle = obstacle or ""
            elif free is not rows:
                rows = free
                request, fleet = self._views(pending, rows, now_s)
        if obstacle is not None and not explains:
            return Considered(rows, request, fleet, None, obstacle)
        if (few := self._without_slow_starters(pending, rows, fleet, now_s)) is not rows:
            few_request, few_fleet = self._views(pending, few, now_s)
            verdict = ask(few_request, few_fleet)
            if verdict.row >= 0:
                return Considered(few, few_request, few_fleet, verdict, obstacle)
        return Considered(rows, request, fleet, ask(request, fleet), obstacle)

    def has_room(self, pending: Pending, leg: Role) -> bool:
        """Return True if a worker that is not busy may take this leg of the request."""
        return self._eligibility.has_room(pending, leg)

    def may_have_model(self, pending: Pending, leg: Role) -> bool:
        """Return True if a worker that did not report the model as missing may take this leg."""
        return self._eligibility.may_have_model(pending, leg)

    def missing_tokens(self, pending: Pending, leg: Role) -> int:
        """Return the prompt tokens that even the best worker would have to compute; at least 1."""
        arrival, rows = pending.arrival, self._eligibility.rows(pending, leg)
        if isinstance(rows, Reject):
            return max(arrival.prompt_tokens, 1)
        if isinstance(rows, SilentCandidates):
            rows = rows.rows
        hits = self._caches.hit_tokens(rows, arrival.chains, arrival.prompt_tokens)
        return max(arrival.prompt_tokens - int(hits.max()), 1)

    def modelled_rate(self, model: str) -> float:
        """Return the tokens per second that a model's workers together should prefill, according to
        their calibrated speeds.
        """
        rates, able = self._columns.prefill_tokens_per_s, self._workers.serving(model)
        return sum(float(rates[worker.slot]) for worker in able if worker.takes_requests)

    def _without_slow_starters(
        self, pending: Pending, rows: Rows, fleet: FleetView, now_s: float
    ) -> Rows:
        """Return `rows` without the new workers that may not get this request yet.

        A new worker in slow start gets a share of requests that grows with time.
        """
        slow_start = self._caches.slow_start
        return (
            slow_start.rows(pending.serial, rows, fleet.hit_tokens, now_s) if slow_start else rows
        )

    def _choice(
        self, rows: Rows, request: RequestView, fleet: FleetView, verdict: Verdict, reason: str
    ) -> Choice:
        policy, costs, row = verdict
        unit, hits = None, fleet.hit_tokens
        if policy is not self._guard.policy:
            reason = "fallback"
        else:
            unit = self._guard.unit
            if reason == "policy" and len(rows.workers) == 1:
                reason = "only_worker"
        hit_tokens, prompt_tokens = hits.item(row), request.prompt_tokens
        decision = Decision(
            policy.name,
            reason,
            hit_tokens,
            prompt_tokens,
            Ranking(rows.worker_ids, costs.copy(), hits, row),
            request.approximate,
            unit,
        )
        uncached_tokens = prompt_tokens - hit_tokens
        loads = NO_LOADS
        if self._caches.index.tiers > 1:
            loads = Loads(fleet.hit_tokens_host.item(row), fleet.hit_tokens_disk.item(row))
            decision.loaded_tokens = loads.tokens
            uncached_tokens -= loads.tokens
        return Choice(rows.workers[row], decision, max(uncached_tokens, 1), loads)

    def _details(self, request: RequestView, fleet: FleetView, verdict: Verdict) -> Details:
        policy, costs, row = verdict
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
            # Blocks evicted to a lower tier are not lost: they cost a load.
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
            group=arrival.identity.group,
            parent=arrival.identity.parent,
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
        """Return a function that returns each worker's hit tokens in host memory and on disk. The
        function computes them when it is first called, and remembers them. Return None if no worker
        has such tiers.
        """
        index = self._caches.index
        if index.tiers == 1:
            return None
        discounts = self._caches.confidence.discounted
        confidence = self._columns.hit_confidence[rows.slots] if discounts else None
        asked = (arrival.chains, arrival.prompt_tokens, hits, confidence)
        return cache(partial(tier_hits, index, rows, *asked))
