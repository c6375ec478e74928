"""The decision core: one object that takes facts and returns actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from policies.facts import (
    Arrival,
    Dispatched,
    Fact,
    Failure,
    Finish,
    FirstToken,
    KvCopied,
    KvEvents,
    KvHeard,
    LoadReport,
    PeerDispatched,
    PeerEnded,
    PeerFact,
    PeerFirstToken,
    PeerProgress,
    Prefilled,
    Probed,
    Progress,
    ReplayEnd,
    Role,
    Silence,
    Tick,
    WorkerChange,
)
from policies.load import LoadedPolicy, load
from router.core.contract.actions import (
    Action,
    Cancel,
    Decision,
    Dispatch,
    Hold,
    Reject,
    Rejection,
    Resync,
    Stage,
)
from router.core.contract.counters import CoreCounters
from router.core.contract.settings import CoreSettings
from router.core.placement.admission import DISPLACED, Admission, Drain, ModelLimit, ModelLimits
from router.core.placement.choice import Choice, Held, Placement, Withheld
from router.core.placement.chooser import Chooser
from router.core.placement.disaggregation import Disaggregation, was_waited_for
from router.core.placement.guard import (
    FallbackError,
    PolicyFaultError,
    PolicyGuard,
    Use,
    no_time,
    raising,
)
from router.core.placement.health import Health
from router.core.placement.hold_queue import REFUSED_MAX
from router.core.placement.leftovers import Leftovers
from router.core.placement.peer_requests import PeerRequests
from router.core.placement.pending import AtWorker, Pending, PrefillLeg
from router.core.placement.retries import NO_MODEL, OTHER_REVISION, Retries, draw_of
from router.core.placement.session_tracking import SessionTracking
from router.core.placement.worker_caches import WorkerCaches
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.sessions.speed import LoadEstimator, SpeedEstimator
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import NO_LOADS, Charge, Ledger
from router.core.workers.table import Worker, WorkerTable

_NOT_PASSED = Rejection(
    502,
    "worker_error",
    "the prompt's KV did not come from the worker that prefilled it in time, and no worker of the "
    "model does all of a request",
)


class RequestListener:
    """Gets a call for every change of a charge, which is a request's load at a worker, to inform
    peer routers. The calls come in the order of time. The methods must neither raise nor wait. This
    base class ignores all calls; the core uses it if there are no peer routers. Lifetime: process.
    """

    def dispatched(self, pending: Pending, charge: Charge, worker: Worker) -> None:
        """Handle the charge of a request, or of its prefill or decode leg, to a worker."""

    def first_token(self, charge: Charge) -> None:
        """Handle the first token of a charged request, which ends its prefill."""

    def progress(self, charge: Charge, output_tokens: int) -> None:
        """Handle the growth of a charged request's answer to `output_tokens` tokens."""

    def ended(self, charge: Charge, finish: Finish | None) -> None:
        """Handle the release of a charge.

        `finish` describes the end of the request if the worker completed its part, and is None
        otherwise.
        """


class RouterCore:
    """The decision core, which takes facts and returns actions, without any I/O. The core is not
    thread-safe: one thread passes it facts, in the order of time. `report` is called when the
    policy fails; by default it raises an error. If it returns, the fallback policy decides
    (`guard`). `clock` measures how long each call of the policy takes; by default no time is
    measured. Lifetime: process.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        settings: CoreSettings,
        seed: int = 0,
        report: Callable[[PolicyFaultError], None] = raising,
        clock: Callable[[], float] = no_time,
        use: Callable[[], Use] | None = None,
        explains_all: bool = False,
    ) -> None:
        """Build a core without workers.

        `PolicyGuard` describes `report`, `clock` and `use`. `Chooser` describes `explains_all`.
        """
        self.settings = settings
        self.counters = CoreCounters()
        self.columns = WorkerColumns(settings.max_workers)
        self.workers = WorkerTable(settings.max_workers)
        self.ledger = Ledger(self.columns)
        self.caches = WorkerCaches(settings, self.columns, self.workers)
        self.arrivals = ArrivalEstimator()
        self._speed = SpeedEstimator(self.columns)
        self._loads = LoadEstimator(self.columns)
        fallback = load(settings.policy_fallback)
        self.guard = PolicyGuard(policy, fallback, report, clock, settings.policy_slow_s, use)
        self.session_tracking = SessionTracking(self.columns, settings, self.workers, policy)
        pool = (self.columns, self.workers, self.caches, self.arrivals, self.session_tracking)
        drain: Drain[str] = Drain()
        self.model_limits = ModelLimits(drain)
        self.chooser = Chooser(self.guard, settings, *pool, self.model_limits, explains_all)
        self._observe = self.guard.observe
        self._seed, self._serial = seed, 0
        self._pending: dict[int, Pending] = {}
        self.health = Health(settings, self.workers, self.counters)
        self.retries = Retries(settings, self.counters, seed)
        ask, reservations = self.chooser.modelled_rate, self.chooser.reservations
        self.admission = Admission(settings, self.counters, ask, reservations, drain)
        self.disaggregation = Disaggregation(
            self.chooser, self.columns, self.workers, self.ledger, self.admission,
            settings.disaggregation, settings.tpot_s,
        )  # fmt: skip
        self.held = self.admission.held
        self.leftovers = Leftovers(self.ledger)
        known = (self.workers, self.ledger, self.caches, self.arrivals, self.session_tracking)
        self.peer_requests = PeerRequests(
            *known, self.admission, self.guard, settings.peer_requests
        )
        self.listener: RequestListener = RequestListener()

    @property
    def policy(self) -> LoadedPolicy:
        """The policy that makes the decisions."""
        return self.guard.policy

    def set_model_limits(self, limits: Mapping[str, ModelLimit]) -> None:
        """Replace the limits of all models by the given limits."""
        self.model_limits.limits = limits

    def set_policy(self, policy: LoadedPolicy) -> None:
        """Decide by another policy from the next request on. The new policy starts without memory
        of earlier requests.
        """
        self.guard.set_policy(policy)
        self.session_tracking.follow(
            policy, [*self._pending.values(), *self.peer_requests.pending()]
        )

    @property
    def inflight_requests(self) -> int:
        """The number of requests that were accepted and have not ended; both dispatched and held
        requests count.
        """
        return len(self._pending)

    @property
    def is_quiet(self) -> bool:
        """True if neither this router nor, as far as it knows, any of its peer routers has an
        unfinished request.
        """
        return not self._pending and not len(self.ledger)

    @property
    def held_requests(self) -> int:
        """The number of requests that wait at the router."""
        return self.held.size

    # --- requests ---------------------------------------------------------------------------

    def on_arrival(self, fact: Arrival) -> list[Action]:
        """Dispatch, hold or reject a request that has arrived."""
        assert fact.request_id not in self._pending, f"request {fact.request_id} arrived twice"
        self._observe(fact)
        serial, self._serial = self._serial, self._serial + 1
        self.arrivals.arrival(fact.session, fact.now_s, fact.tenant)
        self.retries.arrived(fact.now_s)
        rejection, victim = self.admission.admit(fact, len(self._pending))
        if rejection is not None:
            return [self.admission.refuse(fact, fact.now_s, rejection)]
        actions: list[Action] = [] if victim is None else [self._displace(victim, fact.now_s)]
        if self.held.size:  # held requests go first
            actions += self._ask_held(fact.now_s, 1)
        pending = Pending(fact, serial, draw_of(self._seed, serial))
        self._pending[fact.request_id] = pending
        self.session_tracking.arrived(pending)
        return [*actions, *self._place(pending, fact.now_s, "policy")]

    def on_first_token(self, fact: FirstToken) -> list[Action]:
        """Mark a request's prefill as finished, because the first token of its answer arrived."""
        self._observe(fact)
        now_s = fact.now_s
        pending = self._pending.get(fact.request_id)
        charge = None if pending is None else pending.charge
        if pending is None or charge is None or not self.ledger.first_token(charge, now_s):
            return []
        self._learn_speed(charge, now_s)
        self.disaggregation.arrived(charge, now_s)
        self.listener.first_token(charge)
        self.admission.prefill_over(pending, True, now_s)
        actions = self.health.begun(charge.worker_id, pending, now_s)
        prefill = pending.prefill_leg
        if prefill is None:
            return actions
        self.disaggregation.faults.served(prefill.worker_id, charge.worker_id, now_s)
        return [*actions, *self._prefill_leg_served(pending, now_s, None)]

    def on_prefilled(self, fact: Prefilled) -> list[Action]:
        """Dispatch the decode leg of a request whose prefill leg is over. If no worker of the group
        can decode the request now, choose workers for the request again. If both legs started
        together, only release the charge of the prefill leg.
        """
        pending = self._pending.get(fact.request_id)
        if pending is None:
            return []
        if pending.prefill_leg is not None:
            self.admission.prefill_over(pending, True, fact.now_s)
            actions = self._prefill_leg_served(pending, fact.now_s, fact.cached_tokens)
            return [*actions, *self._ask_held(fact.now_s)] if self.held.size else actions
        charge = pending.charge
        if pending.leg != "prefill" or pending.held:
            return []
        # The prefill worker was removed with the KV just before: place the request again.
        if charge is None:
            return self._place(pending, fact.now_s, "retry")
        now_s, prompt = fact.now_s, pending.arrival.prompt_tokens
        finish = Finish(now_s, fact.request_id, prompt, fact.cached_tokens, 1)
        self._observe(finish)  # policies see two dispatches, one after the other
        if self.ledger.first_token(charge, now_s):
            self._learn_speed(charge, now_s)
        try:
            decode = self.disaggregation.place_decode(pending, now_s)
        except FallbackError:  # the fallback fails again below, and there the request is refused
            decode = None
        self.caches.answered(pending, finish)
        worker = self._release(pending, now_s, finish)
        actions = [*self.health.answered(worker, pending, finish), *self.caches.news()]
        if isinstance(decode, Choice):
            actions.append(self._dispatch_decode(pending, decode, now_s))
        else:  # no worker of its group can decode it now: place the request anew
            actions += self._place(pending, now_s, "retry")
        return [*actions, *self._ask_held(now_s)] if self.held.size else actions

    def _learn_speed(self, charge: Charge, now_s: float) -> None:
        """Update a worker's estimated speeds of KV loading and prefill after a prefill."""
        self._loads.first_token(charge, now_s)
        self._speed.first_token(charge, now_s)

    def on_progress(self, fact: Progress) -> list[Action]:
        """Update the token count of a running answer."""
        self._observe(fact)
        pending = self._pending.get(fact.request_id)
        charge = None if pending is None else pending.charge
        if charge is not None:
            gap_s = self.ledger.progress(charge, fact.output_tokens, fact.now_s)
            self.health.grew(charge.worker_id, fact.request_id, fact.now_s)
            self.listener.progress(charge, fact.output_tokens)
            if gap_s is not None:
                self._speed.token_gap(charge.slot, gap_s)
        return []

    def on_finish(self, fact: Finish) -> list[Action]:
        """Release a completed request's load at its worker, and place held requests again."""
        self._observe(fact)
        pending = self._pending.pop(fact.request_id, None)
        if pending is None:
            return []
        assert not pending.held, f"request {fact.request_id} finished while it was held"
        self.caches.answered(pending, fact)
        charge = pending.charge
        if charge is not None and fact.output_tokens is not None:
            self._speed.answered(charge, fact.output_tokens, fact.now_s)
        actions: list[Action] = []
        if pending.prefill_leg is not None and not fact.refused:
            actions += self._prefill_leg_served(pending, fact.now_s, None)
        output_tokens = self.ledger.output_tokens(charge, pending.arrival, fact)
        worker = self._release(pending, fact.now_s, fact)
        self.admission.answered(fact.output_tokens)
        self.session_tracking.ended(pending, fact.now_s, output_tokens, refused=fact.refused)
        actions += self.health.answered(worker, pending, fact)
        actions += self.caches.news()
        return [*actions, *self._ask_held(fact.now_s)] if self.held.size else actions

    def on_failure(self, fact: Failure) -> list[Action]:
        """Release the load of a failed dispatch. If `fact` asks for a retry, try the
        request again.
        """
        pending = self._pending.get(fact.request_id)
        if pending is not None and fact.leg == "prefill" and not fact.retry:
            return self._prefill_leg_failed(pending, fact)
        self._observe(fact)
        if pending is None:
            return []
        if fact.runs_on and self._stays_charged(pending, fact.now_s):
            return []
        prefill_leg = pending.prefill_leg
        actions: list[Action] = self._cancel_other(pending, fact)
        worker = self._release(pending, fact.now_s)
        serves_alone = worker is None or worker.facts.serves_alone
        pending.unsplittable |= was_waited_for(pending, fact, serves_alone)
        if fact.blame == "client":
            self.health.given_up(worker, pending)
            self._drop(pending, fact.now_s)
            return self._ask_held(fact.now_s)
        prefiller = None if prefill_leg is None else self.workers.get(prefill_leg.worker_id)
        if fact.leg == "prefill":
            worker = prefiller
        if fact.leg == "pair" and prefill_leg is not None:
            actions += self._pair_failed(pending, worker, prefiller, fact)
        elif worker is not None:
            # A silent worker may get the request again once it answers, and a worker of another
            # revision as one of its new revision.
            if worker.silent is None and fact.reason != OTHER_REVISION:
                pending.tried.add(worker.worker_id)
            actions += self.health.failed(worker, pending, fact)
        spared = fact.retry and self._spares(pending, fact)
        if not fact.retry:
            self._drop(pending, fact.now_s)
        elif given_up := self.retries.again(pending, worker, fact.reason, fact.now_s, spared):
            actions.append(self._give_up(pending, fact.now_s, given_up))
        else:
            if fact.rest is not None:
                pending.arrival = _at_revision(fact.rest, worker)
            reason = "migration" if fact.rest else "retry"
            actions += self._place(pending, fact.now_s, reason)
        return [*actions, *self._ask_held(fact.now_s)]

    def _spares(self, pending: Pending, fact: Failure) -> bool:
        """Return True if another worker may serve a request that its worker refused. This is so if
        the worker was busy and another worker is not, or if the worker does not have the model and
        another worker may have it.
        """
        leg: Role = "prefill" if fact.leg == "prefill" else pending.leg
        if fact.reason == NO_MODEL:
            return self.chooser.may_have_model(pending, leg)
        return fact.busy_s is not None and self.chooser.has_room(pending, leg)

    def on_peer(self, fact: PeerFact) -> list[Action]:
        """Count a dispatch, first token, progress or end of a peer router's request at a worker."""
        self.peer_requests.take(fact)
        return self._ask_held(fact.now_s) if self.held.size and type(fact) is PeerEnded else []

    def report_open_charges(self, listener: RequestListener) -> None:
        """Report all open charges to a listener that was added while requests were in flight."""
        answers = [(pending, pending.charge) for pending in self._pending.values()]
        prefills = [
            (pending, pending.prefill_leg.charge)
            for pending, _ in answers
            if pending.prefill_leg is not None
        ]
        for pending, charge in [*answers, *prefills]:
            worker = None if charge is None else self.workers.get(charge.worker_id)
            if charge is None or worker is None:
                continue
            listener.dispatched(pending, charge, worker)
            if not charge.waiting:
                listener.first_token(charge)
                listener.progress(charge, charge.output_tokens)

    # --- workers ----------------------------------------------------------------------------

    def on_worker(self, fact: WorkerChange) -> list[Action]:
        """Add, change or remove a worker. Release all charges at a removed worker."""
        self._observe(fact)
        actions: list[Action] = []
        if fact.state in ("gone", "down") and fact.suspended is None:
            for pending in self.leftovers.lost(fact.worker_id):
                self._drop(pending, fact.now_s)
        if fact.state == "gone":  # its slot will be reused: no charge may stay there
            for charge in self.ledger.on_worker(fact.worker_id):
                if self.peer_requests.forget(charge.request_id, fact.now_s):
                    continue
                pending = self._pending[charge.request_id]
                if charge is pending.charge:
                    self._release(pending, fact.now_s)
                else:
                    self._release_prefill_leg(pending, fact.now_s, None)
                actions.append(Cancel(charge.request_id, fact.worker_id, "worker removed"))
            if (worker := self.workers.get(fact.worker_id)) is not None:
                self.disaggregation.forget_worker(worker)
        if fact.state in ("gone", "down"):
            self.session_tracking.lost(self.workers.get(fact.worker_id))
        if fact.state in ("gone", "down") and (worker := self.workers.get(fact.worker_id)):
            self.health.silences.end_silence(worker)
        actions += self.caches.change(fact)
        return [*actions, *self._ask_held(fact.now_s)]

    def on_probed(self, fact: Probed) -> list[Action]:
        """Update a worker's health by the result of a probe that the core asked for."""
        self._observe(fact)
        return [*self.health.probed(fact), *self._ask_held(fact.now_s)]

    def on_silence(self, fact: Silence) -> list[Action]:
        """Record that a worker stops answering the router's probes, or answers them again."""
        self._observe(fact)
        return [*self.health.silence(fact), *self._ask_held(fact.now_s)]

    def on_tick(self, fact: Tick) -> list[Action]:
        """Drop expired state, advance the estimated prefill queues, and try held requests again."""
        self._observe(fact)
        self.ledger.advance(fact.now_s)
        self.caches.expire(fact.now_s)
        self.session_tracking.tick(fact.now_s)
        for pending in self.leftovers.over(fact.now_s):
            self._drop(pending, fact.now_s)
        actions = self.health.tick(fact.now_s)
        for pending in self.held.expired(fact.now_s, self.settings.hold_s):
            actions += self._dispatch_or_reject(pending, fact.now_s)
        refused_max = math.inf if self.guard.asks_held(fact.now_s) else REFUSED_MAX
        return [*actions, *self._ask_held(fact.now_s, refused_max)]

    def on_load_report(self, fact: LoadReport) -> list[Action]:
        """Record a worker's load report. Reported load that exceeds the load of this router's own
        requests counts as the load of other clients.
        """
        self._observe(fact)
        self.ledger.advance(fact.now_s)
        over = self.leftovers.reported_over(fact)
        for pending in over:
            self._drop(pending, fact.now_s)
        self.caches.report(fact, self.ledger)
        news = self.caches.news()
        return [*news, *self._ask_held(fact.now_s)] if over and self.held.size else news

    def on_kv_events(self, fact: KvEvents) -> list[Action]:
        """Apply a batch of a worker's KV events, and ask for a replay if batches are missing."""
        self._observe(fact)
        from_seq = self.caches.kv_events(fact)
        news = self.caches.news()
        return news if from_seq is None else [Resync(fact.worker_id, from_seq), *news]

    def on_replay_end(self, fact: ReplayEnd) -> list[Action]:
        """End a replay of a worker's KV events, and ask for another one if events are missing."""
        self._observe(fact)
        from_seq = self.caches.replay_end(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_kv_copied(self, fact: KvCopied) -> list[Action]:
        """Replace the known content of a worker's cache by a copy from a peer router."""
        from_seq = self.caches.kv_copied(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_kv_heard(self, fact: KvHeard) -> list[Action]:
        """Record that a worker's KV events begin or stop to reach this router, either directly from
        the worker or through a peer router.
        """
        self.caches.kv_heard(fact)
        return []

    # --- dry runs ---------------------------------------------------------------------------

    def explain(self, fact: Arrival) -> Choice | Withheld | Reject:
        """Return the decision for an arriving request as a dry run, without changing any state. The
        decision uses the loads at the time of the last fact. The estimated queues are not advanced
        to the present, because that would change later decisions in the last digits, so that a
        replay of the recorded facts would give other results.
        """
        pending = Pending(fact, self._serial, draw_of(self._seed, self._serial))
        self.session_tracking.look(pending)
        return self.disaggregation.explain(pending, fact.now_s, "policy")

    def explain_held(self, request_id: int, now_s: float) -> Choice | Withheld | Reject | None:
        """Return the decision that the core would make now for a held request, or None if the
        request is not held. This is a dry run, which changes no state.
        """
        pending = self._pending.get(request_id)
        if pending is None or not pending.held:
            return None
        return self.disaggregation.explain(pending, now_s, "held")

    # --- one decision -----------------------------------------------------------------------

    def _place(self, pending: Pending, now_s: float, reason: str) -> list[Action]:
        """Choose workers for a request, then dispatch, hold or reject it. Return the actions.

        If the hold queue is full, another held request may be rejected to make room for this one.
        """
        self.ledger.advance(now_s)
        if now_s >= self.health.busy.next_s:
            self.health.busy.expire(now_s)
        try:
            placement = self.disaggregation.place(pending, now_s, reason)
        except FallbackError:
            failed = Rejection(500, "policy_failed", "the policy failed")
            return [self._give_up(pending, now_s, failed)]
        if isinstance(placement, Held):
            pending.leg = placement.leg
            return self._hold(pending, now_s)
        if isinstance(placement, Reject):
            rejection = Rejection(placement.status, placement.code, placement.message)
            if pending.unsplittable and placement.code == "no_worker_available":
                rejection = _NOT_PASSED
            return [self._give_up(pending, now_s, rejection)]
        return [self._dispatch(pending, placement, now_s)]

    def _dispatch(self, pending: Pending, placement: Placement, now_s: float) -> Dispatch:
        """Charge a request to the workers chosen for it, and return the `Dispatch` action. If two
        workers serve the request, either both legs start now, or only the prefill leg starts and KV
        memory at the decode worker is reserved.
        """
        decode, prefill = placement
        computing = prefill or decode  # the worker that computes the prompt
        self.model_limits.sent(pending)
        self.admission.sent(pending, computing.uncached_tokens, now_s)
        stages: tuple[Stage, ...]
        answering, about = decode, None
        if prefill is None:
            stages = (self._charge(pending, "both", decode, now_s),)
        elif decode.worker.facts.concurrent:
            about = prefill.decision
            second = self._charge(pending, "decode", decode, now_s, at_once=True)
            stages = (self._charge(pending, "prefill", prefill, now_s, at_once=True), second)
        else:
            answering = prefill
            self.disaggregation.keep_decode_place(pending, decode)
            stages = (self._charge(pending, "prefill", prefill, now_s),)
        # The worker that computes the prompt holds the session's cache from now on.
        self.session_tracking.dispatched(pending, computing.worker.slot)
        after_s = max(pending.not_before_s - now_s, 0.0)
        return Dispatch(pending.arrival.request_id, stages, answering.decision, after_s, about)

    def _dispatch_decode(self, pending: Pending, decode: Choice, now_s: float) -> Dispatch:
        """Charge the decode leg of a prefilled request to its worker, and return the `Dispatch`."""
        self.model_limits.sent(pending)
        stages = (self._charge(pending, "decode", decode, now_s),)
        after_s = max(pending.not_before_s - now_s, 0.0)
        return Dispatch(pending.arrival.request_id, stages, decode.decision, after_s)

    def _charge(
        self, pending: Pending, leg: Role, choice: Choice, now_s: float, at_once: bool = False
    ) -> Stage:
        """Charge a request, or a leg of it, to its worker, and return its stage for `Dispatch`.

        `at_once` is True if the prefill leg and the decode leg start together.
        """
        arrival, worker, decision = pending.arrival, choice.worker, choice.decision
        prompt, uncached = arrival.prompt_tokens, choice.uncached_tokens
        key = arrival.request_id, leg
        if leg == "decode":  # its KV comes from the other worker, which may still be prefilling
            room_tokens = prompt if at_once else 0
            charge = self.ledger.reserve(
                *(key, worker.slot, prompt, 1, arrival.stream, now_s),
                *(uncached, NO_LOADS, room_tokens, not at_once),
            )
        else:  # the end of a prefill leg counts as a first token
            shows = arrival.stream or leg == "prefill"
            charge = self.ledger.reserve(
                *(key, worker.slot, prompt, uncached, shows, now_s),
                *(0, choice.loads, 0, not at_once),
            )
        sent: AtWorker = pending
        if at_once and leg == "prefill":
            sent = pending.prefill_leg = PrefillLeg(arrival, worker.worker_id)
        else:
            pending.leg = leg
        sent.charge = charge
        if leg != "decode" or worker.facts.keeps_prefixes:
            sent.expected_by_events = self.caches.expected_by_events(worker, arrival, charge.alone)
            sent.prediction = self.caches.expect(worker, arrival, now_s)
        self.listener.dispatched(pending, charge, worker)
        self.health.sent(worker, sent, now_s)
        self.counters.dispatched(decision, leg)
        if self.guard.remembers:
            self._observe(self._dispatched(arrival, charge, worker, decision))
        return Stage(worker.worker_id, leg)

    @staticmethod
    def _dispatched(
        arrival: Arrival, charge: Charge, worker: Worker, decision: Decision
    ) -> Dispatched:
        """Return the `Dispatched` fact for a charged request or leg, for policies with a memory."""
        return Dispatched(
            charge.dispatched_s,
            arrival.request_id,
            worker.worker_id,
            decision.hit_tokens,
            charge.uncached_tokens,
            arrival.chains[worker.facts.block_size],
            arrival.session,
            arrival.tenant,
            charge.leg,
            arrival.identity.group,
            arrival.identity.parent,
        )

    def _hold(self, pending: Pending, now_s: float) -> list[Action]:
        hold = Hold(pending.arrival.request_id, "policy")
        if pending.held:
            return [hold]
        missing_tokens = self.chooser.missing_tokens(pending, pending.leg)
        rejection, victim = self.admission.hold(pending, missing_tokens, now_s)
        if rejection is not None:
            return [self._give_up(pending, now_s, rejection)]
        actions: list[Action] = [hold]
        if victim is not None:
            actions.insert(0, self._displace(victim, now_s))
            self.admission.hold(pending, missing_tokens, now_s)
        self.session_tracking.held(pending)
        return actions

    def _displace(self, pending: Pending, now_s: float) -> Reject:
        return self._give_up(pending, now_s, DISPLACED)

    def _ask_held(self, now_s: float, refused_max: float = REFUSED_MAX) -> list[Action]:
        sweep = self.held.sweep(now_s, refused_max)
        actions = chain.from_iterable(self._place(pending, now_s, "held") for pending in sweep)
        return [action for action in actions if not isinstance(action, Hold)]

    def _dispatch_or_reject(self, pending: Pending, now_s: float) -> list[Action]:
        """Try once more to dispatch a held request whose time limit is reached, or reject it."""
        deadline_s = pending.arrival.deadline_s
        # Beyond the deadline the client no longer waits.
        if deadline_s is None or now_s < deadline_s:
            actions = self._place(pending, now_s, "held")
            if not any(isinstance(action, Hold) for action in actions):
                return actions
        limit = self.model_limits.reached(pending)
        rejection = self.admission.waited_too_long(pending, now_s, limit)
        return [self._give_up(pending, now_s, rejection)]

    def _release(
        self, pending: Pending, now_s: float, finish: Finish | None = None
    ) -> Worker | None:
        """Release all charges of a request, and its reserved capacity at a decode worker.

        Return the worker of the request, or None if that worker is gone or had no charge. If two
        workers have the request, this is the decode worker. `finish` is set if the request
        succeeded.
        """
        if pending.decode is not None:
            self.disaggregation.free_decode_place(pending)
        if pending.prefill_leg is not None:
            self._release_prefill_leg(pending, now_s, None)
            pending.prefill_leg = None
        charge = pending.charge
        worker = None if charge is None else self._end_charge(pending, charge, finish)
        self.admission.prefill_over(pending, finish is not None, now_s)
        self.model_limits.over(pending)
        return worker

    def _end_charge(self, sent: AtWorker, charge: Charge, finish: Finish | None) -> Worker | None:
        """Release one charge, and return its worker, or None if the worker is gone."""
        sent.charge = None
        self.caches.ended(sent, charge, finish)
        self.ledger.release(charge)
        self.health.left(charge.worker_id, charge.request_id)
        self.listener.ended(charge, finish)
        return self.workers.get(charge.worker_id)

    def _stays_charged(self, pending: Pending, now_s: float) -> bool:
        """Keep the charge of a request whose client left, because its worker may still compute it.
        Return True, or False if the request has no charge.
        """
        charge = pending.charge
        if charge is None:
            return False
        self.leftovers.keep(pending, charge, self.admission.output_tokens, now_s)
        self.health.given_up(self.workers.get(charge.worker_id), pending)
        # The router no longer reads the answer, so it cannot be the trial of its worker.
        self.health.left(charge.worker_id, charge.request_id)
        return True

    # --- two legs at once -------------------------------------------------------------------

    def _prefill_leg_served(
        self, pending: Pending, now_s: float, cached_tokens: int | None
    ) -> list[Action]:
        """Release the charge of a finished prefill leg, and count a success for its worker.

        Do nothing if the charge was released before. `cached_tokens` is the number of prompt tokens
        that the worker found in its cache, or None.
        """
        leg = pending.prefill_leg
        if leg is None or leg.charge is None:
            return []
        arrival = pending.arrival
        finish = Finish(now_s, arrival.request_id, arrival.prompt_tokens, cached_tokens, 1)
        self.caches.answered(leg, finish)
        worker = self._release_prefill_leg(pending, now_s, finish)
        return [*self.health.answered(worker, leg, finish), *self.caches.news()]

    def _prefill_leg_failed(self, pending: Pending, fact: Failure) -> list[Action]:
        """Release the charge of a failed prefill leg, and count a failure against its worker.

        The decode leg of the request has already begun to answer, and continues.
        """
        leg = pending.prefill_leg
        worker = None if leg is None else self.workers.get(leg.worker_id)
        self._release_prefill_leg(pending, fact.now_s, None)
        actions: list[Action] = []
        if worker is not None:
            actions = self.health.failed(worker, pending, fact)
        return [*actions, *self._ask_held(fact.now_s)] if self.held.size else actions

    def _cancel_other(self, pending: Pending, fact: Failure) -> list[Action]:
        """Return the action that cancels one leg of a request because the other leg failed.

        The list is empty if the leg to cancel is over already, or if the client left.
        """
        prefill, charge = pending.prefill_leg, pending.charge
        if prefill is None or fact.blame == "client":
            return []
        if fact.leg == "prefill":
            other = None if charge is None else charge.worker_id
        else:
            other = None if prefill.charge is None else prefill.worker_id
        return [] if other is None else [Cancel(fact.request_id, other, "its other leg failed")]

    def _pair_failed(
        self, pending: Pending, decode: Worker | None, prefill: Worker | None, fact: Failure
    ) -> list[Action]:
        """Exclude both workers of a failed KV transfer from the request's next attempt.

        A worker is excluded only if another worker can replace it. The failure counts against a
        worker's health if `PairFaults` blames that worker.
        """
        if decode is None or prefill is None:
            return []
        legs: tuple[tuple[Worker, Role], ...] = ((prefill, "prefill"), (decode, "decode"))
        place = self.disaggregation
        tried = [w.worker_id for w, leg in legs if place.replaceable(pending, w, leg)]
        pending.tried.update(tried)
        ids = prefill.worker_id, decode.worker_id
        blamed = place.faults.failed(*ids, fact.now_s) if fact.blame == "worker" else []
        failed = (self.health.failed(w, pending, fact) for w, _ in legs if w.worker_id in blamed)
        return [*chain.from_iterable(failed)]

    def _release_prefill_leg(
        self, pending: Pending, now_s: float, finish: Finish | None
    ) -> Worker | None:
        """Release the charge of a prefill leg that started together with its decode leg.

        Return the worker of the leg, or None if the charge was released before or the worker is
        gone. `finish` is None unless the prefill succeeded.
        """
        leg = pending.prefill_leg
        if leg is None or leg.charge is None:
            return None
        if self.guard.remembers:
            request_id = pending.arrival.request_id
            if finish is None:
                self._observe(Failure(now_s, request_id, "client", leg="prefill"))
            else:
                self._observe(Prefilled(now_s, request_id, finish.cached_tokens))
        return self._end_charge(leg, leg.charge, finish)

    def _drop(self, pending: Pending, now_s: float) -> None:
        """Forget a request. The caller knows already that it has ended."""
        self._release(pending, now_s)
        self.session_tracking.ended(pending, now_s)
        self.admission.wait_over(pending, now_s)
        self._pending.pop(pending.arrival.request_id, None)

    def _give_up(self, pending: Pending, now_s: float, rejection: Rejection) -> Reject:
        self._drop(pending, now_s)
        return self.admission.refuse(pending.arrival, now_s, rejection, pending)


def _at_revision(rest: Arrival, worker: Worker | None) -> Arrival:
    """Return the rest of a request whose answer has begun. If possible, it asks for a worker of the
    revision that began the answer.
    """
    revision = None if worker is None else worker.facts.revision
    if revision is None or rest.revision is not None:
        return rest
    return replace(rest, revision=revision)


# The handler of each kind of fact.
_HANDLERS: Mapping[type, Callable[[RouterCore, Any], list[Action]]] = MappingProxyType(
    {
        Arrival: RouterCore.on_arrival,
        FirstToken: RouterCore.on_first_token,
        Prefilled: RouterCore.on_prefilled,
        Progress: RouterCore.on_progress,
        Finish: RouterCore.on_finish,
        Failure: RouterCore.on_failure,
        LoadReport: RouterCore.on_load_report,
        KvEvents: RouterCore.on_kv_events,
        ReplayEnd: RouterCore.on_replay_end,
        KvCopied: RouterCore.on_kv_copied,
        KvHeard: RouterCore.on_kv_heard,
        WorkerChange: RouterCore.on_worker,
        Probed: RouterCore.on_probed,
        Silence: RouterCore.on_silence,
        PeerDispatched: RouterCore.on_peer,
        PeerFirstToken: RouterCore.on_peer,
        PeerProgress: RouterCore.on_peer,
        PeerEnded: RouterCore.on_peer,
        Tick: RouterCore.on_tick,
    }
)


def take(core: RouterCore, fact: Fact) -> list[Action]:
    """Pass a fact of any kind to the core's method for it, and return the actions.

    Raises TypeError for a fact that only the core itself makes.
    """
    handler = _HANDLERS.get(type(fact))
    if handler is None:
        raise TypeError(f"not a fact the core takes from outside: {fact!r}")
    return handler(core, fact)
