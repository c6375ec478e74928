"""One decision: who may take the request, what each would cost by the policy, who takes it."""

from __future__ import annotations

from functools import partial

from policies.contract import FleetView, Ints, RequestView
from policies.record import record
from router.core.actions import Decision, Ranking, Reject
from router.core.columns import WorkerColumns
from router.core.eligible import Eligibility, Rows
from router.core.guard import PolicyGuard
from router.core.hold_queue import Pending
from router.core.live_fleet import LiveFleet
from router.core.roster import Roster
from router.core.settings import CoreSettings
from router.core.tier_hits import tier_hits
from router.core.workers import Worker, WorkerTable
from router.estimators.arrivals import ArrivalEstimator


@record
class Choice:
    """A worker, and why."""

    worker: Worker
    decision: Decision


class Chooser:
    """Eligibility, then the policy or what stands in for it (`guard`). Lifetime: process."""

    def __init__(
        self,
        guard: PolicyGuard,
        settings: CoreSettings,
        columns: WorkerColumns,
        workers: WorkerTable,
        roster: Roster,
        arrivals: ArrivalEstimator,
    ) -> None:
        self._guard = guard
        self._settings = settings
        self._columns = columns.read_only()
        self._eligibility = Eligibility(workers)
        self._roster = roster
        self._arrivals = arrivals

    def choose(
        self, pending: Pending, now_s: float, reason: str, asked: bool = False
    ) -> Choice | Reject | None:
        """The worker to take the request, a refusal, or None: hold it.

        `asked`: somebody only wants to know, and a policy is not judged by what it answers.

        Raises FallbackError where even the fallback fails.
        """
        arrival = pending.arrival
        rows = self._eligibility.rows(pending, now_s)
        if isinstance(rows, Reject):
            return rows
        hits = self._roster.hit_tokens(rows, arrival.chains, arrival.prompt_tokens)
        request, fleet = self._views(pending, rows, hits, now_s)
        decide = self._guard.consult if asked else self._guard.decide
        policy, costs, row = decide(request, fleet)
        if row < 0:
            return None
        if policy is not self._guard.policy:
            reason = "fallback"
        return Choice(
            rows.workers[row],
            Decision(
                policy=policy.name,
                reason="only_worker" if reason == "policy" and len(rows) == 1 else reason,
                hit_tokens=int(hits[row]),
                prompt_tokens=arrival.prompt_tokens,
                candidates=Ranking(rows.worker_ids, costs.copy(), hits, row),
                approximate=arrival.approximate,
            ),
        )

    def _views(
        self, pending: Pending, rows: Rows, hits: Ints, now_s: float
    ) -> tuple[RequestView, FleetView]:
        arrival = pending.arrival
        size = rows.block_sizes[0]
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
        )
        index = self._roster.index
        below_gpu = None
        if index.tiers > 1:  # looked up only where a policy asks
            told = (arrival.chains, arrival.prompt_tokens, hits)
            below_gpu = partial(tier_hits, index, rows, *told)
        fleet = LiveFleet(
            self._columns,
            rows,
            hits,
            now_s,
            self._roster.others_s,
            self._settings.signal_stale_s,
            self._arrivals,
            below_gpu,
        )
        return request, fleet
