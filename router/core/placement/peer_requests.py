"""Charges requests that peer routers sent to shared workers like this router's own requests. A
peer's request costs its worker as much as one of this router's requests, leaves blocks in the
worker's cache, and belongs to a session and a tenant. So a decision sees one pool, whichever router
a request came through. The speed and health of a worker are learned from this router's requests
only, because news of peers' requests comes late.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from policies import facts
from router.core.placement.admission import Admission
from router.core.placement.guard import PolicyGuard
from router.core.placement.pending import Pending
from router.core.placement.session_tracking import SessionTracking
from router.core.placement.worker_caches import WorkerCaches
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.workers.ledger import Ledger
from router.core.workers.table import WorkerTable


class PeerRequests:
    """Charges requests of peer routers to the workers that this router shares with them.

    Peers' requests have negative ids, which this router's own requests never have. A policy with a
    memory receives facts about both kinds of requests, through `guard`. Lifetime: process.
    """

    def __init__(
        self,
        workers: WorkerTable,
        ledger: Ledger,
        caches: WorkerCaches,
        arrivals: ArrivalEstimator,
        session_tracking: SessionTracking,
        admission: Admission,
        guard: PolicyGuard,
        most: int,
    ) -> None:
        """Start without requests. At most `most` requests of all peers together are kept."""
        self._workers, self._ledger, self._caches = workers, ledger, caches
        self._arrivals, self._session_tracking, self._admission = (
            arrivals,
            session_tracking,
            admission,
        )
        self._guard = guard
        self._most = most
        self._pending: dict[int, Pending] = {}
        self.numbers = count(-1, -1)  # ids of peers' requests, for all parts that receive them

    def room(self) -> bool:
        """Return True if there is room for one more request of a peer."""
        return len(self._pending) < self._most

    def __len__(self) -> int:
        return len(self._pending)

    def pending(self) -> Iterable[Pending]:
        """Return the peers' requests that have not ended, oldest first."""
        return self._pending.values()

    def take(self, fact: facts.PeerFact) -> None:
        """Handle a fact of any kind about a peer's request."""
        if isinstance(fact, facts.PeerDispatched):
            self.dispatched(fact)
        elif isinstance(fact, facts.PeerEnded):
            self.ended(fact)
        elif isinstance(fact, facts.PeerFirstToken):
            self.first_token(fact)
        else:
            self.progress(fact)

    def dispatched(self, fact: facts.PeerDispatched) -> None:
        """Charge a peer's request to its worker; ignore the fact if the worker is unknown."""
        arrival, now_s = fact.arrival, fact.now_s
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return
        request_id, prompt, uncached = (
            arrival.request_id,
            arrival.prompt_tokens,
            fact.uncached_tokens,
        )
        assert request_id not in self._pending, f"request {request_id} of a peer came twice"
        self._ledger.advance(now_s)
        pending = Pending(arrival, serial=-1, draw=0.0, standing=fact.standing)
        self._pending[request_id] = pending
        self._admission.sent(pending, uncached, now_s)
        # A request that another worker prefills at the same time already has its room.
        at_once = worker.facts.concurrent and worker.facts.role == "decode" and uncached == 1
        pending.charge = self._ledger.reserve(
            *((request_id, "both"), worker.slot, prompt, uncached, arrival.stream, now_s),
            room_tokens=prompt if at_once else 0,
        )
        if fact.late:
            self._caches.is_a_peers(worker)
        chain = arrival.chains.get(worker.facts.block_size)
        if chain is None or not worker.facts.keeps_prefixes:
            return
        guard = self._guard
        guard.observe(arrival)
        self._arrivals.arrival(arrival.session, now_s, arrival.tenant)
        self._session_tracking.arrived(pending)
        pending.prediction = self._caches.expect(worker, arrival, now_s)
        self._session_tracking.dispatched(pending, worker.slot)
        if guard.remembers:
            sent = (request_id, worker.worker_id, prompt - uncached, uncached)
            guard.observe(
                facts.Dispatched(
                    *(now_s, *sent, chain, arrival.session, arrival.tenant),
                    group=arrival.identity.group,
                    parent=arrival.identity.parent,
                )
            )

    def first_token(self, fact: facts.PeerFirstToken) -> None:
        """Mark the prefill of a peer's request as finished."""
        pending = self._pending.get(fact.request_id)
        if pending is None or pending.charge is None:
            return
        if self._ledger.first_token(pending.charge, fact.now_s):
            if self._guard.remembers:
                self._guard.observe(facts.FirstToken(fact.now_s, fact.request_id))
            self._admission.prefill_over(pending, True, fact.now_s)

    def progress(self, fact: facts.PeerProgress) -> None:
        """Update the token count of a peer's running answer."""
        pending = self._pending.get(fact.request_id)
        if pending is not None and pending.charge is not None:
            self._ledger.progress(pending.charge, fact.output_tokens, fact.now_s)

    def ended(self, fact: facts.PeerEnded) -> None:
        """Release the charge of a peer's request, if the charge is still open."""
        pending = self._pending.pop(fact.request_id, None)
        if pending is None or pending.charge is None:
            return
        finish, now_s, charge = fact.finish, fact.now_s, pending.charge
        self._caches.ended(pending, charge, finish)
        output_tokens = None
        if finish is not None:
            output_tokens = self._ledger.output_tokens(charge, pending.arrival, finish)
        self._ledger.release(charge)
        self._admission.prefill_over(pending, finish is not None, now_s)
        refused = finish is not None and finish.refused
        self._session_tracking.ended(pending, now_s, output_tokens, refused=refused)
        if self._guard.remembers:
            self._guard.observe(finish or facts.Failure(now_s, fact.request_id, "client"))

    def forget(self, request_id: int, now_s: float) -> bool:
        """End a peer's request because its worker was removed. Return False if `request_id` is not
        that of a peer's request.
        """
        known = request_id in self._pending
        self.ended(facts.PeerEnded(now_s, request_id))
        return known
