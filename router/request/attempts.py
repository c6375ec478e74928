"""Sends each attempt at a request to the worker, or to the two workers, that the decision core
chose.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from router.body.legs import SIDECAR, Leg
from router.core.contract.actions import Dispatch, Reject
from router.http.messages import Answer, Response, error_response
from router.http.reply import Header
from router.record.explain import (
    EXPLAIN_HEADER,
    HELD_CODES,
    HELD_HEADER,
    TO_CLIENTS,
    WORKER_HEADER,
    explanation_line,
    refusal_line,
)
from router.record.request_record import Attempt
from router.request.deadlines import is_late, late_answer
from router.request.leg_sender import AttemptTerms, LegSender
from router.request.moving import Movers
from router.request.pings import PatientReply, can_ping
from router.request.service import Service
from router.request.state import AttemptEnd, RequestState
from router.request.two_legs import TwoLegs
from router.upstream.client_reply import ClientReply, Reply
from router.upstream.edited_reply import EditedReply

# Refusals of the core in whose place the client gets a worker's words.
_WORKER_CODES = frozenset({"worker_error", "retry_budget_exhausted", "model_not_found"})
_QUICK_TOKENS = 4_096.0  # prompt tokens that every worker computes without a long silence


class Attempts:
    """Sends requests to the workers that the decision core chose. Lifetime: process."""

    def __init__(
        self,
        service: Service,
        terms: AttemptTerms,
        keep_authorization: bool,
        movers: Movers | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """Prepare to send requests. `movers` lets another worker continue a stream that breaks off;
        None switches this off. The other arguments are those of `LegSender` and `TwoLegs`.
        """
        self._service = service
        self._sender = LegSender(service, terms, keep_authorization, clock)
        self._two_legs = TwoLegs(service, self._sender, clock, draw)
        self.movers = movers

    @property
    def terms(self) -> AttemptTerms:
        """Return the timeouts and other limits that attempts use now."""
        return self._sender.terms

    def renew(self, terms: AttemptTerms, movers: Movers | None) -> None:
        """Use these limits from now on, and `movers` to continue streams that break off (None:
        never).
        """
        self._sender.renew(terms)
        self.movers = movers

    def follow_stream(self, state: RequestState) -> None:
        """Begin to record the request's answer, if it is a stream that another worker may continue.

        If the first worker fails, another worker continues the recorded answer.
        """
        if self.movers is not None and state.carrier.moves and state.arrival.stream:
            read = (state.arrival, state.prompt.encoded)
            state.stream = state.enter(self.movers.stream(state.body, state.http.path, *read))

    def begin(self, state: RequestState, action: Dispatch) -> Attempt:
        """Create the attempt for `action`, the decision core's choice of workers.

        If another worker must prefill at the same time, create a second attempt for that worker and
        store it in `state`.
        """
        state.carrier.placed(action.worker_id)
        state.prefill = state.sidecar_prefill = None
        if action.prefill is not None:
            if state.kept_kv is not None:  # the two workers pass the KV by themselves
                state.kept_kv.failed(may_be_kept=True)
            first = replace(action, stages=action.stages[:1], decision=action.prefill, prefill=None)
            prefill = self._noted(state, first)
            member = self._service.fleet.members.get(action.worker_id)
            if member is not None and member.transfer == SIDECAR:  # which sends the prefill
                state.sidecar_prefill = prefill
            else:
                state.prefill = prefill
        return self._noted(state, action)

    def _noted(self, state: RequestState, action: Dispatch) -> Attempt:
        service, account = self._service, state.account
        worker = service.dispatcher.core.workers.get(action.worker_id)
        size = None if worker is None else worker.facts.block_size
        attempt = Attempt(
            state.arrival, action, service.clock(), account.decision_started_s(), size
        )
        account.begins(attempt)
        state.attempts.append(attempt)
        attempt.routed_by = state.prompt.routed_by
        if state.name is not None and worker is not None:
            attempt.name, attempt.revision = state.name, worker.facts.revision
        if service.hits is not None and state.explain != "no":
            member = service.fleet.members.get(action.worker_id)
            attempt.hits = service.hits.of_request(member, state.prompt)
        if (sequence := state.prompt.sequence) is not None:
            of = attempt.model, attempt.tenant, sequence
            service.sequences.sent(*of, attempt.worker_id)
        service.latest.add(attempt)
        return attempt

    async def send(self, state: RequestState, attempt: Attempt) -> AttemptEnd:
        """Send the request, or its prefill or decode leg, to the chosen workers.

        The answer is relayed to the client, except that of a prefill leg. Return the result of the
        attempt.
        """
        stream = state.stream
        if stream is not None:
            stream.placed(attempt.uncached_tokens)
        if attempt.wait_s:
            await asyncio.sleep(attempt.wait_s)
        member = self._service.fleet.members.get(attempt.worker_id)
        if member is None:
            return AttemptEnd()
        state.account.record_destination(attempt, member)
        headers = self._headers(state, attempt)
        patient = self._is_patient(state, attempt)
        if state.name is None and state.kept_open is None and not patient:
            reply = state.carrier.reply(self.terms.client_buffer_bytes, headers)
        else:
            reply = self._reply(state, headers, patient)
        if attempt.leg == "prefill":  # two legs, one after the other: the first one
            return await self._two_legs.prefill(state, attempt, member, reply)
        if stream is not None:
            assert isinstance(reply, ClientReply), "only streams over HTTP move"
            if not stream.take(member.kind, reply):
                return AttemptEnd()
        if state.prefill is not None:  # two legs at once
            end = await self._two_legs.both(state, attempt, member, reply)
        else:  # one worker does all of it, or decodes it
            leg = Leg(state.body)
            if state.kept_kv is not None:
                leg = await self._two_legs.second_leg(state, attempt, state.kept_kv)
            depends = attempt.leg == "decode" or state.sidecar_prefill is not None
            sender = self._two_legs if depends else self._sender
            end = await sender.answer(state, leg, attempt, member, reply)
        if (outcome := end.outcome) is not None:
            begun = outcome.answers and (outcome.error is None or outcome.bytes_to_client > 0)
            if state.kept_kv is not None and begun:
                state.kept_kv.read()
            state.last_refusal = outcome.held or state.last_refusal
        return end

    def answer(self, state: RequestState, end: AttemptEnd) -> Answer:
        """Return the answer for the client after the last attempt at the request."""
        reply, outcome, stream = end.reply, end.outcome, state.stream
        assert reply is not None, "it was sent"
        assert outcome is not None, "it was sent"
        if end.refusal is not None and stream is not None and stream.begun:
            return stream.give_up("refused")  # a refusal cannot follow a part of an answer
        if is_late(outcome):
            return late_answer(reply)
        if end.refusal is not None:
            end.refusal.deliver(reply)
        return reply

    def refuse(self, state: RequestState, reject: Reject) -> Answer:
        """Return the answer for the client if the decision core refuses the request."""
        state.account.rejected()
        if state.stream is not None and state.stream.begun:  # too late for an answer of its own
            state.account.refused(reject, 200, begun=True)
            return state.stream.give_up("refused")
        answer = self._refusal(state, reject)
        if isinstance(answer, Response) and (line := self._why_refused(state, reject)) is not None:
            answer.headers[EXPLAIN_HEADER] = line
        state.account.refused(reject, answer.status)
        return answer

    def _refusal(self, state: RequestState, reject: Reject) -> Answer:
        """Return the answer for a refused request: a worker's own error answer if that led to the
        refusal, otherwise the router's.
        """
        if state.last_refusal is not None and reject.code in _WORKER_CODES:
            reply: Reply | None = state.kept_open
            if reply is None:
                headers = state.account.headers()
                reply = state.carrier.reply(self.terms.client_buffer_bytes, headers)
            state.last_refusal.deliver(reply)
            return reply
        answer = error_response(reject.status, reject.message, reject.code)
        if reject.retry_after_s is not None:
            answer.headers["Retry-After"] = str(max(math.ceil(reject.retry_after_s), 1))
        return answer

    def _is_patient(self, state: RequestState, attempt: Attempt) -> bool:
        """Return True if the client gets comments while its worker is silent for long.

        The relay's thread writes no comments, but costs less for each token. So of the streams that
        the thread could carry, only those get comments whose worker is expected to be silent for
        longer than the time until the first comment.
        """
        every_s = self.terms.ping_s
        if not every_s or not state.arrival.stream or state.stream is not None:
            return False
        if state.path.needs is None and attempt.leg != "prefill":
            core = self._service.dispatcher.core
            charge = core.ledger.get(attempt.request_id, attempt.leg)
            if charge is None or (charge.alone and charge.work_tokens < _QUICK_TOKENS):
                return False
            work = charge.end_work - core.columns.drained_work[charge.slot]
            if work < every_s * core.columns.prefill_tokens_per_s[charge.slot]:
                return False
        return can_ping(state)

    def _reply(self, state: RequestState, headers: tuple[Header, ...], patient: bool) -> Reply:
        """Return the object that writes the reply to the client in one attempt.

        `headers` are those that the router adds to the answer. `patient` says whether the client
        may get comments during the attempt.
        """
        room, names, name = self.terms.client_buffer_bytes, self._service.names, state.name
        editor = None
        if name is not None and names is not None and name.renames:
            editor = names.editor(name, state.path)
        if state.kept_open is not None:
            state.kept_open.follow(editor)
            return state.kept_open
        if patient:
            plain = ClientReply(state.http, room, headers)
            if editor is not None:
                plain = EditedReply(state.http, room, headers, editor)
            return PatientReply(state, plain, editor, room)
        if editor is None:
            return state.carrier.reply(room, headers)
        return EditedReply(state.http, room, headers, editor)

    def _headers(self, state: RequestState, attempt: Attempt) -> tuple[Header, ...]:
        """Return the headers that the router adds to a worker's answer."""
        headers: tuple[Header, ...] = ((WORKER_HEADER, b"%d" % attempt.worker_id),)
        if attempt.decision.reason == "held":
            held_ms = max(attempt.sent_s - attempt.arrived_s, 0.0) * 1e3
            headers = (*headers, (HELD_HEADER, b"%d" % round(held_ms)))
        if state.explain in TO_CLIENTS:
            headers = (*headers, (EXPLAIN_HEADER.encode(), _explanation(state, attempt)))
        return headers + state.account.headers()

    def _why_refused(self, state: RequestState, reject: Reject) -> str | None:
        """Return the header value that explains a refusal to the client, or None.

        The client gets an explanation only if it asked for explanations and no worker could take
        the request.
        """
        if state.explain not in TO_CLIENTS or reject.code not in HELD_CODES:
            return None
        now_s = self._service.clock()
        choice = self._service.dispatcher.explain(replace(state.arrival, now_s=now_s))
        return refusal_line(state.arrival, now_s, choice)


def _explanation(state: RequestState, attempt: Attempt) -> bytes:
    """Return the header value that explains why the attempt's worker was chosen.

    For a decode leg it also explains the choice of the prefill worker.
    """
    before = state.attempts[-2] if attempt.leg == "decode" and len(state.attempts) > 1 else None
    prefill = None
    if before is not None and before.leg == "prefill":  # noted just before
        prefill = before
    return explanation_line(attempt, state.explain == "full", prefill)
