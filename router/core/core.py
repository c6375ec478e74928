"""The decision core: one object, facts in, actions out.

Each `on_*` takes one fact of `policies.facts` and returns what the shell must do. Time comes
with the facts and chance from the seed, so the same facts and the same seed give the same
actions, in the router as in the simulator. Choosing a worker and charging it are one step.
"""

from __future__ import annotations

from collections.abc import Callable

from policies import facts
from policies.load import LoadedPolicy, load
from router.core.actions import (
    Action,
    Cancel,
    Dispatch,
    Hold,
    PutAside,
    Reject,
    Resync,
    Stage,
)
from router.core.chooser import Choice, Chooser, Withheld
from router.core.columns import WorkerColumns
from router.core.counters import CoreCounters
from router.core.draws import draw_of
from router.core.following import Following
from router.core.guard import FallbackError, PolicyFaultError, PolicyGuard, no_time, raising
from router.core.hold_queue import HoldQueue, Pending
from router.core.ledger import Ledger
from router.core.roster import Roster
from router.core.settings import CoreSettings
from router.core.workers import Worker, WorkerTable
from router.estimators.arrivals import ArrivalEstimator
from router.estimators.speed import SpeedEstimator


class RouterCore:
    """Lifetime: process. Not thread-safe: one thread tells it facts, in the order of time.

    `report` is told when the policy fails; the default raises. Where it returns, all goes on by
    the fallback (`guard`). `clock` measures how long the policy takes; by default, no time.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        settings: CoreSettings,
        seed: int = 0,
        report: Callable[[PolicyFaultError], None] = raising,
        clock: Callable[[], float] = no_time,
    ) -> None:
        self.settings = settings
        self.counters = CoreCounters()
        self.columns = WorkerColumns(settings.max_workers)
        self.workers = WorkerTable(settings.max_workers)
        self.ledger = Ledger(self.columns)
        self.roster = Roster(settings, self.columns, self.workers)
        self.arrivals = ArrivalEstimator()
        self._speed = SpeedEstimator(self.columns)
        fallback = load(settings.policy_fallback)
        self.guard = PolicyGuard(policy, fallback, report, clock, settings.policy_slow_s)
        self.following = Following(self.columns, settings, self.ledger, self.workers, policy)
        pool = (self.columns, self.workers, self.roster, self.arrivals, self.following)
        self.chooser = Chooser(self.guard, settings, *pool)
        self._observe = self.guard.observe
        self._seed = seed
        self._serial = 0
        self._pending: dict[int, Pending] = {}
        self.held = HoldQueue(settings.hold_requests)

    @property
    def policy(self) -> LoadedPolicy:
        """The policy in use."""
        return self.guard.policy

    def set_policy(self, policy: LoadedPolicy) -> None:
        """Decide by another policy from the next request on; it starts without memory."""
        self.guard.set_policy(policy)
        self.following.follow(policy, self._pending.values())

    @property
    def inflight_requests(self) -> int:
        """Accepted and unfinished: dispatched or held."""
        return len(self._pending)

    @property
    def held_requests(self) -> int:
        """Waiting at the router."""
        return len(self.held)

    # --- requests ---------------------------------------------------------------------------

    def on_arrival(self, fact: facts.Arrival) -> list[Action]:
        """A request came in: dispatch, hold or reject it."""
        assert fact.request_id not in self._pending, f"request {fact.request_id} arrived twice"
        self._observe(fact)
        serial, self._serial = self._serial, self._serial + 1
        self.arrivals.arrival(fact.session, fact.now_s)
        if len(self._pending) >= self.settings.inflight_requests:
            return [self._refuse(fact, 503, "router_full", "the router is at its request limit")]
        pending = Pending(fact, serial, draw_of(self._seed, serial))
        self._pending[fact.request_id] = pending
        self.following.arrived(pending)
        return [self._place(pending, fact.now_s, "policy")]

    def on_first_token(self, fact: facts.FirstToken) -> list[Action]:
        """Its prefill is over."""
        self._observe(fact)
        charge = self.ledger.first_token(fact.request_id, fact.now_s)
        if charge is not None:
            self._speed.first_token(charge, fact.now_s)
        return []

    def on_progress(self, fact: facts.Progress) -> list[Action]:
        """A running answer grew."""
        self._observe(fact)
        gap_s = self.ledger.progress(fact.request_id, fact.output_tokens, fact.now_s)
        if gap_s is not None and (charge := self.ledger.get(fact.request_id)) is not None:
            self._speed.token_gap(charge.slot, gap_s)
        return []

    def on_finish(self, fact: facts.Finish) -> list[Action]:
        """The answer is complete: its load is released and held requests are asked again."""
        self._observe(fact)
        pending = self._pending.pop(fact.request_id, None)
        if pending is None:
            return []
        assert not pending.held, f"request {fact.request_id} finished while it was held"
        worker = self._release(pending, fact)
        self.following.ended(pending, fact.now_s, fact.output_tokens or 0)
        if worker is not None:
            worker.succeeded()
        return self._ask_held(fact.now_s) if self.held else []

    def on_failure(self, fact: facts.Failure) -> list[Action]:
        """A dispatch ended badly, or the client left: release, and retry where asked."""
        self._observe(fact)
        pending = self._pending.get(fact.request_id)
        if pending is None:
            return []
        worker = self._release(pending)
        if fact.blame == "client":
            self._drop(pending, fact.now_s)
            return self._ask_held(fact.now_s)
        actions: list[Action] = []
        if worker is not None:
            pending.tried.add(worker.worker_id)
            if fact.blame == "worker" and self.workers.failed(worker, fact.now_s, self.settings):
                self.counters.ejections += 1
                aside_s = worker.aside_until_s - fact.now_s
                actions.append(PutAside(worker.worker_id, aside_s, fact.reason))
        if not fact.retry:
            self._drop(pending, fact.now_s)
        elif len(pending.tried) >= self.settings.max_attempts:
            tried = f"{len(pending.tried)} workers failed this request, last: {fact.reason}"
            actions.append(self._give_up(pending, fact.now_s, 502, "worker_error", tried))
        else:
            self.counters.retries += 1
            actions.append(self._place(pending, fact.now_s, "retry"))
        return [*actions, *self._ask_held(fact.now_s)]

    def explain(self, fact: facts.Arrival) -> Choice | Withheld | Reject:
        """What would be decided for this request, by loads as of the last fact; all stays as it is.

        Not even the queues drain: in one step more they end in other digits, and a recording of
        the facts would not repeat what was decided.
        """
        pending = Pending(fact, self._serial, draw_of(self._seed, self._serial))
        self.following.look(pending)
        return self.chooser.explain(pending, fact.now_s, "policy")

    def explain_held(self, request_id: int, now_s: float) -> Choice | Withheld | Reject | None:
        """Why this request waits, as of now; None where it does not."""
        pending = self._pending.get(request_id)
        if pending is None or not pending.held:
            return None
        return self.chooser.explain(pending, now_s, "held")

    # --- workers ----------------------------------------------------------------------------

    def on_worker(self, fact: facts.WorkerChange) -> list[Action]:
        """A worker joined, changed state or left. What ran on one that is gone is cancelled."""
        self._observe(fact)
        actions: list[Action] = []
        if fact.state == "gone":  # its slot is about to be reused: nothing may stay charged there
            for charge in self.ledger.on_worker(fact.worker_id):
                self._release(self._pending[charge.request_id])
                actions.append(Cancel(charge.request_id, fact.worker_id, "worker removed"))
        if fact.state in ("gone", "down"):
            self.following.lost(self.workers.get(fact.worker_id))
        actions += self.roster.change(fact)
        return [*actions, *self._ask_held(fact.now_s)]

    def on_load_report(self, fact: facts.LoadReport) -> list[Action]:
        """A worker told its load: what we did not send it is others' load."""
        self._observe(fact)
        self.ledger.advance(fact.now_s)
        self.roster.report(fact, self.ledger)
        return []

    def on_kv_events(self, fact: facts.KvEvents) -> list[Action]:
        """A worker's cache changed."""
        self._observe(fact)
        from_seq = self.roster.kv_events(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_replay_end(self, fact: facts.ReplayEnd) -> list[Action]:
        """A replay is over; what it left out is asked for once more, or its hits are unknown."""
        self._observe(fact)
        from_seq = self.roster.replay_end(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_tick(self, fact: facts.Tick) -> list[Action]:
        """Time passed: expire, drain, ask held requests again."""
        self._observe(fact)
        self.ledger.advance(fact.now_s)
        self.roster.expire(fact.now_s)
        self.following.tick(fact.now_s)
        actions: list[Action] = []
        for pending in self.held.expired(fact.now_s, self.settings.hold_s):
            why = f"no worker could take the request within {self.settings.hold_s:g} s"
            actions.append(self._give_up(pending, fact.now_s, 503, "hold_timeout", why))
        return [*actions, *self._ask_held(fact.now_s)]

    # --- one decision -----------------------------------------------------------------------

    def _place(self, pending: Pending, now_s: float, reason: str) -> Action:
        """Dispatch with the charge taken, hold, or reject."""
        self.ledger.advance(now_s)
        try:
            choice = self.chooser.choose(pending, now_s, reason)
        except FallbackError:
            return self._give_up(pending, now_s, 500, "policy_failed", "the policy failed")
        if isinstance(choice, Reject):
            return self._give_up(pending, now_s, choice.status, choice.code, choice.message)
        if choice is None:
            return self._hold(pending, now_s)
        return self._dispatch(pending, choice, now_s)

    def _dispatch(self, pending: Pending, choice: Choice, now_s: float) -> Dispatch:
        arrival, worker = pending.arrival, choice.worker
        request_id, prompt = arrival.request_id, arrival.prompt_tokens
        if pending.held:
            self.held.remove(pending)
            self.counters.held[pending.standing].add(now_s - pending.arrival.now_s)
        uncached = max(prompt - choice.decision.hit_tokens, 1)
        self.ledger.reserve(request_id, worker.slot, prompt, uncached, arrival.stream, now_s)
        pending.prediction = self.roster.expect(worker, arrival, now_s)
        pending.worker_id = worker.worker_id
        self.following.dispatched(pending, worker.slot)
        self.counters.dispatched(choice.decision)
        if self.guard.remembers:
            chain = arrival.chains[worker.facts.block_size]
            sent = (request_id, worker.worker_id, choice.decision.hit_tokens, uncached)
            self._observe(facts.Dispatched(now_s, *sent, chain, arrival.session))
        stage = Stage(worker.worker_id, worker.facts.role)
        return Dispatch(request_id, (stage,), choice.decision)

    def _hold(self, pending: Pending, now_s: float) -> Action:
        if not pending.held:
            if self.held.full:
                why = f"{len(self.held)} requests wait for a worker already"
                return self._give_up(pending, now_s, 503, "hold_queue_full", why)
            self.held.add(pending)
            self.following.held(pending)
            self.counters.holds += 1
        return Hold(pending.arrival.request_id, "policy")

    def _ask_held(self, now_s: float) -> list[Action]:
        actions = (self._place(pending, now_s, "held") for pending in self.held.sweep(now_s))
        return [action for action in actions if not isinstance(action, Hold)]

    # --- endings ----------------------------------------------------------------------------

    def _release(self, pending: Pending, finish: facts.Finish | None = None) -> Worker | None:
        """Take its charge off its worker; the worker, if there still is one."""
        self.roster.ended(pending, self.ledger.get(pending.arrival.request_id), finish)
        charge = self.ledger.release(pending.arrival.request_id)
        pending.worker_id = None
        return None if charge is None else self.workers.get(charge.worker_id)

    def _drop(self, pending: Pending, now_s: float) -> None:
        """Forget a request whose end the shell knows already."""
        self._release(pending)
        self.following.ended(pending, now_s)
        if pending.held:
            self.held.remove(pending)
            self.counters.held[pending.standing].add(now_s - pending.arrival.now_s)
        self._pending.pop(pending.arrival.request_id, None)

    def _give_up(self, pending: Pending, now_s: float, status: int, code: str, why: str) -> Reject:
        self._drop(pending, now_s)
        return self._refuse(pending.arrival, status, code, why)

    def _refuse(self, arrival: facts.Arrival, status: int, code: str, message: str) -> Reject:
        self.counters.rejected(code)
        retry_after_s = self.settings.retry_after_s if status in (429, 503) else None
        return Reject(arrival.request_id, status, code, message, retry_after_s)
