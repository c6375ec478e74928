"""Sends a request, or its prefill or decode leg, to one worker, and relays the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

from kvkernels import AnswerDue
from router.body.legs import PREFILLER, Leg, Transfer
from router.body.paths import Path
from router.body.scan import LONG_BYTES
from router.engines.table import TRANSFERS
from router.engines.triton import is_unreadable_request
from router.fleet.member import Member
from router.http.reply import Header, Outcome, ReplySink, Timeouts, UpstreamRequest
from router.record.request_record import Attempt
from router.request.deadlines import Deadlines, in_time
from router.request.missing_path import MissingPathFilter
from router.request.pings import PatientReply
from router.request.prompts import is_counted
from router.request.quotas import tenant_header
from router.request.refusals import (
    is_model_missing,
    is_queue_full,
    pass_refusal_on,
    queue_full,
)
from router.request.service import ID_HEADER, Service
from router.request.settling import settle_sidecar
from router.request.state import AttemptEnd, RequestState
from router.request.token_ids import with_token_ids
from router.upstream.client_reply import KEY_HEADERS, Reply, upstream_request
from router.upstream.kept_open_reply import KeptOpenReply

_UNCHANGED_EVERY = 64  # of so many requests, one is sent as text instead of token ids, as a check
_NO_NAMES = frozenset[bytes]()
_NO_HEADERS: tuple[Header, ...] = ()
_PINGED = (PatientReply, KeptOpenReply)


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """The limits and times for attempts at requests. Lifetime: process, replaced on reload."""

    timeouts: Timeouts
    client_buffer_bytes: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    ping_s: float = 0.0  # a stream of a silent worker gets a comment so often; 0: none
    tenant_header: str = "x-tenant"  # the header with the tenant of a request, for workers
    forward_token_ids: bool = False  # workers that take ids get them instead of text
    transfers: Mapping[str, Transfer] = field(default_factory=lambda: TRANSFERS)  # by kind


class LegSender:
    """Sends a request, or its prefill or decode leg, to one worker. Lifetime: process."""

    def __init__(
        self,
        service: Service,
        terms: AttemptTerms,
        keep_authorization: bool,
        clock: Callable[[], float],
    ) -> None:
        """Prepare to send legs.

        `keep_authorization` is True if workers get the client's API key, too. `clock` returns the
        present time in seconds, on the clock of deadlines.
        """
        self._service = service
        self._clock = clock
        self._keys = _NO_NAMES if keep_authorization else frozenset(KEY_HEADERS)
        self.renew(terms)

    def renew(self, terms: AttemptTerms) -> None:
        """Use other limits for attempts from now on."""
        self.terms = terms
        self._hidden = self._keys | {terms.tenant_header.encode()}

    def request(
        self,
        state: RequestState,
        leg: Leg,
        attempt: Attempt,
        member: Member,
        due: AnswerDue | None = None,
    ) -> UpstreamRequest:
        """Return the request for a worker, with the headers of the client, the router and the leg.
        `due` is the form that the answer must have, or None if its form is not checked.
        """
        terms, arrival = self.terms, state.arrival
        hidden, before, after = self._hidden, _NO_HEADERS, _NO_HEADERS
        if attempt.leg != "both":
            before = (*self._leg_headers(state), *leg.headers)
        if arrival.tenant is not None:
            after = (tenant_header(terms.tenant_header, arrival.tenant),)
        if arrival.deadline_s is not None:
            hidden |= terms.deadlines.names()
            after = (*after, terms.deadlines.left(arrival.deadline_s - self._clock()))
        return upstream_request(
            state.http,
            leg.body,
            before,
            after,
            hidden=hidden,
            rank=member.rank,
            trace=state.account.trace,
            due=due,
            once=leg.once,
        )

    def _leg_headers(self, state: RequestState) -> tuple[Header, ...]:
        """Return the headers that are added only to prefill legs and decode legs.

        These are the request's id, unless the client gave one, and the address of the prefill
        worker if a sidecar at the decode worker sends the prefill leg.
        """
        headers = _NO_HEADERS
        if state.sidecar_prefill is not None:
            member = self._service.fleet.members.get(state.sidecar_prefill.worker_id)
            if member is not None:  # else the worker that decodes does all of it
                headers = ((PREFILLER, urlsplit(member.spec.url).netloc.encode()),)
        if state.http.headers.get(ID_HEADER) is not None:
            return headers
        number = state.account.id or f"warmroute-{state.arrival.request_id}"
        return (*headers, (ID_HEADER.encode(), number.encode()))

    async def answer(
        self,
        state: RequestState,
        leg: Leg,
        attempt: Attempt,
        member: Member,
        reply: Reply,
        on_begun: Callable[[float], None] | None = None,
    ) -> AttemptEnd:
        """Send the request, or its decode leg, to a worker, and relay the answer to the client.

        `on_begun` is called with the time of the answer's first byte, in seconds on the clock of
        deadlines. If it is None, the first byte of a streamed answer is reported to the decision
        core instead.
        """
        arrival, stream, terms = state.arrival, state.stream, self.terms
        text = leg.body
        if terms.forward_token_ids and state.path.reads == "openai" and on_begun is None:
            leg = replace(leg, body=await _body_for(member, state, text))
        sent = self.request(state, leg, attempt, member, state.path.due(arrival.max_output_tokens))
        sink: ReplySink = stream or reply
        filtered = None
        if terms.ping_s and stream is None and isinstance(reply, _PINGED):
            sent = replace(sent, ping_s=terms.ping_s)
        if arrival.needs is not None:
            sent, filtered = _filtered(sent, state.path, arrival.model, sink)
            sink = filtered
        streams = arrival.stream
        prefilled = None
        if state.sidecar_prefill is not None:
            prefilled = partial(settle_sidecar, self._service, state)
        sending = state.carrier.upstream(member, attempt, prefilled).send(
            sent if stream is None else stream.request(sent),
            sink,
            terms.deadlines.timeouts(terms.timeouts, streams, attempt.uncached_tokens),
            on_begun or (state.ticket.first_token if streams else None),
            state.ticket.progress if streams else None,
        )
        if arrival.deadline_s is not None:
            # A stream that may move reports an abort only at its end: cut its reply to the client.
            cut, through = (reply, filtered) if stream is None else (stream.reply, None)
            sending = in_time(sending, cut, arrival.deadline_s, self._clock, through)
        outcome = pass_refusal_on(await sending, sink, arrival.model)
        if stream is not None:
            outcome = stream.ended(outcome)
        if filtered is not None:
            outcome = filtered.outcome_for_client(outcome)
        if outcome.held is not None and stream is None and not is_model_missing(outcome):
            outcome, is_final = _judged(outcome, member, reply)
            if is_final:
                return AttemptEnd(reply, outcome)
        as_sent = filtered is None and leg.body is text and is_counted(state.prompt)
        shown, rest = reply, None
        if stream is not None:
            shown, rest = stream.reply, stream.rest() if outcome.resumable else None
        exact = state.prompt.tokens if as_sent else None
        return AttemptEnd(shown, outcome, prompt_tokens=exact, rest=rest)


def _filtered(
    sent: UpstreamRequest, path: Path, model: str, sink: ReplySink
) -> tuple[UpstreamRequest, MissingPathFilter]:
    """Prepare a request to a path that some engines do not have.

    Return the request, and a filter in front of `sink`. The filter holds back an answer that says
    "no such path", so that another worker can be tried.
    """
    answers = path.answers
    sent = replace(sent, mark=path.mark, keeps_ends=answers is not None)
    escaped = "%" in sent.target.partition("?")[0]
    return sent, MissingPathFilter(sink, answers, escaped, model)


def _judged(outcome: Outcome, member: Member, reply: Reply) -> tuple[Outcome, bool]:
    """Decide what to do with a worker's refusal that the client has not received yet. Return the
    outcome, and True if this is the end of the attempt.

    A full queue becomes an error. A refusal that any other worker would repeat is sent to the
    client.
    """
    held = outcome.held
    assert held is not None, "it was kept"
    if is_queue_full(held.head.status, held.body):
        return replace(outcome, error=queue_full()), True
    if is_unreadable_request(member.kind, held.head.status, held.body):
        held.deliver(reply)  # no other worker could read it either
        return replace(outcome, error=None, held=None), True
    return outcome, False


async def edited(edit: Callable[[bytes], Leg], body: bytes) -> Leg:
    """Return the leg that `edit` makes from a request's body. A long body is edited in a thread."""
    return edit(body) if len(body) < LONG_BYTES else await asyncio.to_thread(edit, body)


async def _body_for(member: Member, state: RequestState, body: bytes) -> bytes:
    """Return the body for this worker: `body` itself, or a copy with token ids instead of text."""
    if state.arrival.request_id % _UNCHANGED_EVERY == 0:  # its worker counts tokens by itself
        return body
    if (kind := member.kind) is None:  # not known yet
        return body
    what = (body, state.http.path, kind, state.prompt.encoded)
    if len(body) < LONG_BYTES:
        return with_token_ids(*what)
    return await asyncio.to_thread(with_token_ids, *what)
