"""Handles an inference request step by step, from the API key to the end of the answer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from router.core.contract.actions import Reject
from router.http.errors import ClientError
from router.http.messages import Answer, Request, refused
from router.request.account import Account
from router.request.attempts import Attempts
from router.request.carrier import Carrier
from router.request.dialect import Target
from router.request.dispatcher import Ticket
from router.request.first_worker import FirstWorkerWaits
from router.request.in_turn import let_others_run
from router.request.leg_sender import AttemptTerms
from router.request.moving import Movers
from router.request.pings import Pings, as_event
from router.request.quotas import Tenants
from router.request.reading import InferenceReader, InferenceTerms
from router.request.service import Service
from router.request.settling import Next, settle
from router.request.state import RequestState


class Inference:
    """Handles every inference path. Lifetime: process."""

    def __init__(
        self, service: Service, tenants: Tenants, reader: InferenceReader, attempts: Attempts
    ) -> None:
        self._service = service
        self._waits = FirstWorkerWaits(service, tenants, reader)
        self._pings = Pings(
            lambda: service.waiting.terms().ping_s, lambda: attempts.terms.client_buffer_bytes
        )
        self.tenants = tenants
        self.reader = reader
        self.attempts = attempts

    def renew(self, terms: InferenceTerms, attempts: AttemptTerms, movers: Movers | None) -> None:
        """Use these limits of reading and of attempts, and these movers of streams, from now on."""
        self.reader.terms = terms
        self.attempts.renew(attempts, movers)

    async def handle(self, http: Request, target: Target | None = None) -> Answer:
        """Answer an inference request that came over HTTP. Raises the same errors as `answer`."""
        with self.begin(http, Carrier(http)) as state:
            try:
                answer = await self.answer(state, target)
            except ClientError as error:
                if state.kept_open is None:
                    raise
                self._service.faulty(error.status)
                answer = refused(error)
            return answer if state.kept_open is None else as_event(state.kept_open, answer)

    def begin(self, http: Request, carrier: Carrier) -> RequestState:
        """Return the state of a new request, as a context manager whose exit ends the request."""
        service = self._service
        return RequestState(http, carrier, Ticket(service.dispatcher), Account(service, http))

    async def answer(self, state: RequestState, target: Target | None = None) -> Answer:
        """Handle a request from the check of its API key to the end of its answer.

        `target` is the model and call of a request in a protocol with paths of its own, such as
        KServe v2. Raises ClientError if the request is invalid or not allowed, and CancelledError
        or OSError if the client left.
        """
        account, attempts, waits = state.account, self.attempts, self._waits

        # Identify: the API key names the tenant, the rights and the quota.
        account.identify(self.tenants.key_of(state.http))  # 400, 401, 429

        # Read: token ids and chain hashes of the prompt, and all other data for a decision.
        path = state.carrier.path(target)
        edits = state.carrier.edits
        read = await self.reader.read(state.http, path, account.terms, target, edits)  # 4xx
        account.spend(read.arrival.prompt_tokens)  # 429
        state.understood(read)  # 403

        # Place: the core chooses a worker, or two of which one prefills and one decodes; or holds
        # the request until it can; or refuses it. Without the core a draining router refuses it,
        # and a request of a known model waits while no worker is there.
        refusal = self._service.refusal(read.arrival.request_id)
        if refusal is None and self._service.waiting.arrives(state.arrival):
            with self._pings.during(state):
                refusal = await waits.wait(state, target)
        self._arrive_or_refuse(state, refusal)
        while_held = partial(self._pings.during, state)  # its client gets comments

        while True:
            action = await state.ticket.next_action(while_held)
            if isinstance(action, Reject):  # 404, 429, 5xx, or the last words of a worker
                if waits.can_help(state, action):
                    with self._pings.during(state):
                        refusal = await waits.wait(state, target)
                    self._arrive_or_refuse(state, refusal)
                    continue
                return account.answered(attempts.refuse(state, action), state.attempts)

            # Attempt: relay the answer of the worker. Of two legs the first one is an attempt of
            # its own, which leaves KV for the second one at its worker; or both are sent at once,
            # two attempts of which one has the answer, and a leg that fails stops the other one.
            attempt = attempts.begin(state, action)
            await let_others_run()
            first_leg = attempt.leg == "prefill"  # the client sees nothing of this leg
            with self._pings.during(state) if first_leg else nullcontext():
                end = await attempts.send(state, attempt)

            # Account: release the charge, count, log. The core is asked again after a first leg,
            # and after a failure of a worker if the client has seen nothing of its answer, or if
            # another worker can continue the answer. If the client leaves, leaving `state` tells
            # the core, and gives back KV that nobody has read.
            if settle(self._service, state, attempt, end) is Next.OVER:
                return account.answered(attempts.answer(state, end), state.attempts)

    def _arrive_or_refuse(self, state: RequestState, refusal: Reject | None) -> None:
        """Ask the core for a worker, unless the request is refused already."""
        account = state.account
        self.attempts.follow_stream(state)
        account.note_decision_start()
        if refusal is None:
            state.ticket.arrive(state.arrival, explained=state.explain != "no" or account.traced)
        else:
            state.ticket.refuse(refusal)
