"""One decision: who may take the request, what each would cost by the policy, who takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Floats, Ints, RequestView
from policies.facts import Arrival, Fact
from policies.load import LoadedPolicy
from policies.parameters import PolicyError
from policies.pick import pick, ranked
from router.core.actions import Candidate, Decision, Reject
from router.core.columns import WorkerColumns
from router.core.hold_queue import Pending
from router.core.roster import Roster
from router.core.settings import CoreSettings
from router.core.workers import Worker, WorkerTable
from router.estimators.arrivals import ArrivalEstimator

_EXPLAINED = 3  # candidates named in a decision
_MODELS_NAMED = 8  # models listed in an error


@dataclass(frozen=True, slots=True)
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
        self._columns = columns
        self._workers = workers
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
        eligible = self._eligible(pending, now_s)
        if isinstance(eligible, Reject):
            return eligible
        hits = self._roster.hit_tokens(eligible, arrival.chains, arrival.prompt_tokens)
        try:  # a policy may be anybody's code: whatever it raises is its own failure
            costs = self._costs(pending, eligible, hits, now_s)
            row = pick(costs, pending.draw, self.policy.temperature)
        except Exception as error:
            raise _failed(self.policy, error) from error
        if row < 0:
            return None
        best = [row, *(r for r in ranked(costs, _EXPLAINED) if r != row)][:_EXPLAINED]
        return Choice(
            eligible[row],
            Decision(
                policy=self.policy.name,
                reason="only_worker" if reason == "policy" and len(eligible) == 1 else reason,
                hit_tokens=int(hits[row]),
                prompt_tokens=arrival.prompt_tokens,
                candidates=tuple(
                    Candidate(eligible[r].worker_id, float(costs[r]), int(hits[r])) for r in best
                ),
                approximate=arrival.approximate,
            ),
        )

    def _costs(self, pending: Pending, eligible: list[Worker], hits: Ints, now_s: float) -> Floats:
        arrival = pending.arrival
        size = eligible[0].facts.block_size
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
        fleet = self._columns.view(
            np.array([w.slot for w in eligible], dtype=np.int64),
            hits,
            now_s,
            self._settings.signal_stale_s,
            self._arrivals.rate_per_s(now_s),
            self._arrivals.live_sessions(now_s),
        )
        return self.policy.costs(request, fleet, self._state)

    def _eligible(self, pending: Pending, now_s: float) -> list[Worker] | Reject:
        """Workers that may take the request, or why none may."""
        arrival = pending.arrival
        pool = self._workers.serving(arrival.model)
        if not pool:
            return self._no_pool(arrival)
        able = [
            w
            for w in pool
            if w.state == "ready"
            and w.facts.role == "both"
            and w.facts.block_size in arrival.chains
        ]
        # With everybody put aside, one that failed lately is a better bet than a sure refusal.
        ready = [w for w in able if w.takes_requests(now_s)] or able
        if not ready:
            states = sorted({w.shown_state(now_s) for w in pool})
            why = f"all {len(pool)} workers of model {arrival.model!r} are {' or '.join(states)}"
            return _reject(arrival, 503, "no_worker_available", why)
        untried = [w for w in ready if w.worker_id not in pending.tried]
        if not untried:
            why = f"every available worker failed this request ({len(pending.tried)} tried)"
            return _reject(arrival, 502, "worker_error", why)
        fitting = [w for w in untried if _fits(arrival, w)]
        if not fitting:
            longest = max(w.facts.max_model_tokens or 0 for w in untried)
            why = f"the prompt has {_longest(arrival)} tokens, the model takes {longest}"
            return _reject(arrival, 400, "context_length_exceeded", why)
        return fitting

    def _no_pool(self, arrival: Arrival) -> Reject:
        models = self._workers.models()
        if not models:
            return _reject(arrival, 503, "no_worker_available", "no worker has been recognized yet")
        named = ", ".join(models[:_MODELS_NAMED]) + (", ..." if len(models) > _MODELS_NAMED else "")
        why = f"the model {arrival.model!r} does not exist; this router serves: {named}"
        return _reject(arrival, 404, "model_not_found", why)


def _failed(policy: LoadedPolicy, error: Exception) -> PolicyError:
    return PolicyError(f"policy {policy.name} failed: {type(error).__name__}: {error}")


def _fits(arrival: Arrival, worker: Worker) -> bool:
    """Whether the prompt leaves room for an answer. A guessed length proves nothing."""
    limit = worker.facts.max_model_tokens
    return limit is None or arrival.approximate or _longest(arrival) < limit


def _longest(arrival: Arrival) -> int:
    """Tokens of its longest prompt: a model's limit holds for each one."""
    longest = arrival.longest_prompt_tokens
    return arrival.prompt_tokens if longest is None else longest


def _reject(arrival: Arrival, status: int, code: str, message: str) -> Reject:
    return Reject(arrival.request_id, status, code, message)
