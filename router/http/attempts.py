"""The attempts at one request: ask the core, send, relay; on a failure ask for another worker.

Everything that happens to a request after it was read and understood, up to its answer's last byte.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from aiohttp import web

from policies.facts import Arrival
from router.core.actions import Reject
from router.fleet_io.member import Member
from router.http.absent import Sieve
from router.http.client_reply import ClientReply, upstream_request
from router.http.client_request import ClientRequest
from router.http.cohort import cohort
from router.http.desk import Errand
from router.http.errors import error_body, error_type
from router.http.explain_header import EXPLAIN_HEADER
from router.http.forward_ids import with_token_ids
from router.http.local_desk import LocalCase
from router.http.migration.migrations import Migrations
from router.http.migration.plan import MOVABLE
from router.http.migration.stream import Stream
from router.http.paths import Path
from router.http.patience import Patience, in_time, late_answer, ran_out
from router.http.permits import Permit
from router.http.prompts import Prompt
from router.http.relay.reply import Header, HeldReply, Outcome, Timeouts
from router.http.tenants import told_on
from router.http.visits import VisitedCase
from router.tracing.trace import Traced

_UNCHANGED_EVERY = 64  # requests: one goes as text where ids are forwarded, to be checked


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """Bounds and times of the attempts at a request. Lifetime: process, replaced on reload."""

    timeouts: Timeouts
    client_buffer_bytes: int
    patience: Patience = field(default_factory=Patience)
    tenant_header: str = "x-tenant"  # in which workers are told whose a request is
    forward_token_ids: bool = False  # workers that take ids get them instead of text


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that was read and understood. Lifetime: request."""

    request: ClientRequest
    body: bytes
    path: Path
    arrival: Arrival
    prompt: Prompt
    permit: Permit | None = None  # of its key, where there are keys
    traced: Traced | None = None  # None: its trace headers go on as they are


class Attempts:
    """Carries requests to workers, one after the other where they fail. Lifetime: process."""

    def __init__(
        self,
        terms: Callable[[], AttemptTerms],
        keep_authorization: bool,
        migrations: Migrations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_authorization`: False where clients' keys are this router's own business."""
        self._terms = terms
        self._clock = clock  # that deadlines are told by
        self._keep_authorization = keep_authorization
        self._migrations = migrations

    async def answer(self, asking: Asking, case: LocalCase | VisitedCase) -> web.StreamResponse:
        """The answer of the first worker that gives one, or the refusal."""
        if self._migrations is None or not asking.arrival.stream:
            return await self._answer(asking, case, None)
        if asking.arrival.needs not in MOVABLE:
            return await self._answer(asking, case, None)
        read = (asking.arrival, asking.prompt.encoded)
        with self._migrations.stream(asking.body, asking.request.path, *read) as stream:
            return await self._answer(asking, case, stream)

    async def _answer(
        self, asking: Asking, case: LocalCase | VisitedCase, stream: Stream | None
    ) -> web.StreamResponse:
        held: HeldReply | None = None
        lost: Outcome | None = None  # the worker's that a begun stream leaves
        while True:
            errand = await case.next_errand()
            await cohort()
            if isinstance(errand, Reject):
                if stream is not None and stream.begun:  # too late for an answer of its own
                    if asking.permit is not None and lost is not None:
                        asking.permit.used(lost)
                    case.refused(errand, 200)
                    return stream.give_up("refused")
                return self._refused(asking, errand, held, case)
            if errand.wait_s:
                await asyncio.sleep(errand.wait_s)
            if errand.carrier is None:
                case.gone()
                continue
            headers, terms = _extra_headers(asking, errand), self._terms()
            reply = ClientReply(asking.request, terms.client_buffer_bytes, headers)
            if stream is not None and not stream.take(errand.carrier.kind, reply):
                case.gone()
                continue
            outcome, own_tokens = await self._attempt(asking, errand, reply, case, stream, terms)
            held = outcome.held or held
            lost = outcome if outcome.resumable else lost
            rest = stream.rest() if stream is not None and outcome.resumable else None
            if not case.ended(outcome, own_tokens, rest):
                if asking.permit is not None:
                    asking.permit.used(outcome)
                if ran_out(outcome):
                    return late_answer(reply if stream is None else stream.reply)
                return reply if stream is None else stream.reply

    async def _attempt(
        self,
        asking: Asking,
        errand: Errand,
        reply: ClientReply,
        case: LocalCase | VisitedCase,
        stream: Stream | None,
        terms: AttemptTerms,
    ) -> tuple[Outcome, int | None]:
        """What became of the request at one worker, and our count of its prompt's tokens."""
        arrival, carrier = asking.arrival, errand.carrier
        assert carrier is not None, "an errand without a carrier is none"
        sent = _body_for(carrier, asking, terms)
        request = upstream_request(
            asking.request,
            sent,
            keep_authorization=self._keep_authorization,
            rank=carrier.rank,
            trace=asking.traced,
        )
        request = told_on(request, terms.tenant_header, arrival.tenant)
        if arrival.deadline_s is not None:
            request = terms.patience.passed_on(request, arrival.deadline_s - self._clock())
        sieve = None
        if arrival.needs is not None:
            request, sieve = replace(request, mark=asking.path.mark), Sieve(stream or reply)
        sending = carrier.upstream.send(
            request if stream is None else stream.request(request),
            sieve or stream or reply,
            terms.patience.timeouts(terms.timeouts, arrival.stream, errand.uncached_tokens),
            case.first_token if arrival.stream else None,
            case.progress if arrival.stream else None,
        )
        if arrival.deadline_s is not None:
            shown = reply if stream is None else stream.reply
            sending = in_time(sending, shown, arrival.deadline_s, self._clock)
        outcome = await sending
        if stream is not None:
            outcome = stream.ended(outcome)
        if sieve is not None:
            return sieve.judged(outcome), None
        exact = sent is asking.body and asking.prompt.encoded
        return outcome, asking.prompt.tokens if exact else None

    def _refused(
        self, asking: Asking, reject: Reject, held: HeldReply | None, case: LocalCase | VisitedCase
    ) -> web.StreamResponse:
        """The core's refusal, explained where the client asked why."""
        if asking.permit is not None:
            asking.permit.turned_away(reject.code)
        answer = self._turned_away(asking.request, reject, held)
        if not answer.prepared and (line := case.why_refused(reject)) is not None:
            answer.headers[EXPLAIN_HEADER] = line
        case.refused(reject, answer.status)
        return answer

    def _turned_away(
        self, request: ClientRequest, reject: Reject, held: HeldReply | None
    ) -> web.StreamResponse:
        """A refusal's answer; where workers did answer with an error, the last of these."""
        if held is not None and reject.code in ("worker_error", "retry_budget_exhausted"):
            reply = ClientReply(request, self._terms().client_buffer_bytes)
            held.deliver(reply)
            return reply
        headers = {}
        if reject.retry_after_s is not None:
            headers["Retry-After"] = str(max(math.ceil(reject.retry_after_s), 1))
        kind = error_type(reject.status)
        body = error_body(reject.message, kind, code=reject.code)
        return web.Response(
            status=reject.status, body=body, content_type="application/json", headers=headers
        )


def _extra_headers(asking: Asking, errand: Errand) -> tuple[Header, ...]:
    """What the router adds to the worker's answer."""
    if asking.permit is None:
        return errand.headers
    left = asking.permit.headers()
    return (*errand.headers, *((name.encode(), value.encode()) for name, value in left))


def _body_for(carrier: Member, asking: Asking, terms: AttemptTerms) -> bytes:
    """What this worker is sent: the client's body, or with ids in it instead of the text."""
    if (
        not terms.forward_token_ids
        or asking.path.reads != "openai"
        or (kind := carrier.kind) is None
    ):
        return asking.body
    if asking.arrival.request_id % _UNCHANGED_EVERY == 0:  # its worker counts tokens by itself
        return asking.body
    return with_token_ids(asking.body, asking.request.path, kind, asking.prompt.encoded)
