"""One decision: who may take the request, what each would cost by the policy, who takes it."""

from __future__ import annotations

from functools import partial
from typing import Any

from policies.contract import Floats, Ints, RequestView
from policies.facts import Fact
from policies.load import LoadedPolicy
from policies.parameters import PolicyError
from policies.pick import pick
from policies.record import record
from router.core.actions import Decision, Ranking, Reject
from router.core.columns import WorkerColumns
from router.core.eligible import Eligibility, Rows
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
    """Eligibility, then the policy, then `pick`. Lifetime: process (the policy's state)."""

    def __init__(
        self,
        policy: LoadedPolicy,
        settings: CoreSettings,
        columns: WorkerColumns,
        workers: WorkerTable,
        roster: Roster,
        arrivals: ArrivalEstimator,
    ) -> None:
        self._settings = settings
        self._columns = columns.read_only()
        self._eligibility = Eligibility(workers)
        self._roster = roster
        self._arrivals = arrivals
        self.set_policy(policy)

    def set_policy(self, policy: LoadedPolicy) -> None:
        """Decide by `policy` from now on. Raises PolicyError; the one before stays then."""
        try:
            state: Any = policy.initial_state()
        except Exception as error:
            raise _failed(policy, error) from error
        self.policy = policy
        self.remembers = policy.remembers
        self._state = state

    def observe(self, fact: Fact) -> None:
        """Let a policy with memory see a fact. Raises PolicyError; its memory stays as it was."""
        try:
            self._state = self.policy.observe(fact, self._state)
        except Exception as error:
            raise _failed(self.policy, error) from error

    def choose(self, pending: Pending, now_s: float, reason: str) -> Choice | Reject | None:
        """The worker to take the request, a refusal, or None: hold it. Raises PolicyError."""
        arrival = pending.arrival
        rows = self._eligibility.rows(pending, now_s)
        if isinstance(rows, Reject):
            return rows
        hits = self._roster.hit_tokens(rows, arrival.chains, arrival.prompt_tokens)
        try:  # a policy may be anybody's code: whatever it raises is its own failure
            costs = self._costs(pending, rows, hits, now_s)
            row = pick(costs, pending.draw, self.policy.temperature)
        except Exception as error:
            raise _failed(self.policy, error) from error
        if row < 0:
            return None
        return Choice(
            rows.workers[row],
            Decision(
                policy=self.policy.name,
                reason="only_worker" if reason == "policy" and len(rows) == 1 else reason,
                hit_tokens=int(hits[row]),
                prompt_tokens=arrival.prompt_tokens,
                candidates=Ranking(rows.worker_ids, costs.copy(), hits, row),
                approximate=arrival.approximate,
            ),
        )

    def _costs(self, pending: Pending, rows: Rows, hits: Ints, now_s: float) -> Floats:
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
        return self.policy.costs(request, fleet, self._state)


def _failed(policy: LoadedPolicy, error: Exception) -> PolicyError:
    return PolicyError(f"policy {policy.name} failed: {type(error).__name__}: {error}")
