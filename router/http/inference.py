"""One inference request, from the client's bytes to the last byte of its answer.

Read the body, learn its prompt's chain, ask the core, relay; on a worker's failure before the
first byte ask again, as long as the core names another worker.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiohttp import web

from policies.facts import Arrival
from router.core.actions import Reject
from router.fleet_io.manager import FleetManager
from router.fleet_io.member import Member
from router.http.client_reply import ClientReply, upstream_request
from router.http.decisions import DecisionLog
from router.http.errors import ClientError, WorkerError, error_body, error_type
from router.http.explain_header import (
    HELD_CODES,
    TO_CLIENTS,
    Asked,
    asked,
    explain_refusal,
    reply_headers,
)
from router.http.forward_ids import with_token_ids
from router.http.prompts import Prompt, PromptReader
from router.http.relay.reply import HeldReply, Outcome, Timeouts, Usage
from router.http.scan import ScanLimits, Scanned, scan
from router.http.tenants import Tenants
from router.http.token_check import TokenCheck
from router.metrics import RouterMetrics
from router.record.request_log import Entry, RequestLog
from router.switchboard import Switchboard, Ticket

log = logging.getLogger(__name__)

_UNCHANGED_EVERY = 64  # requests: one goes as text where ids are forwarded, to be checked


@dataclass(frozen=True, slots=True)
class InferenceTerms:
    """Bounds and times of inference requests. Lifetime: process, replaced on reload."""

    scan: ScanLimits
    timeouts: Timeouts
    client_buffer_bytes: int
    session_header: str
    explain: bool  # clients may ask for the reasons of a decision
    explain_every: int = 0  # every n-th request is explained in full for the operator; 0: none
    forward_token_ids: bool = False  # workers that take ids get them instead of text


class Inference:
    """Handles every inference path. Lifetime: process."""

    def __init__(
        self,
        switchboard: Switchboard,
        fleet: FleetManager,
        prompts: PromptReader,
        tenants: Tenants,
        metrics: RouterMetrics,
        decisions: DecisionLog,
        terms: Callable[[], InferenceTerms],
        request_log: RequestLog | None = None,
        check: TokenCheck | None = None,
    ) -> None:
        self._switchboard = switchboard
        self._fleet = fleet
        self._prompts = prompts
        self._tenants = tenants
        self._metrics = metrics
        self._decisions = decisions
        self._terms = terms
        self._request_log = request_log
        self._check = check

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. Raises ClientError for what is the client's own fault."""
        tenant = self._tenants.tenant_of(request)
        body = await request.read()
        arrival, prompt = await self.arrival(body, request.path, request.headers.get, tenant)
        terms = self._terms()
        explain = asked(request, arrival.request_id, terms.explain, terms.explain_every)
        with self._switchboard.ticket(arrival.request_id, explain != "no") as ticket:
            ticket.arrive(arrival)
            if self._request_log is None:
                return await self._relay(request, body, arrival, prompt, ticket, explain)
            with self._request_log.entry(arrival) as entry:
                return await self._relay(request, body, arrival, prompt, ticket, explain, entry)

    async def arrival(
        self,
        body: bytes,
        path: str,
        header: Callable[[str], str | None],
        tenant: str | None,
    ) -> tuple[Arrival, Prompt]:
        """The request as the core takes it. Raises ClientError."""
        terms = self._terms()
        scanned = scan(body, path, terms.scan)
        model = scanned.model or self._only_model()
        while True:
            sizes = self._switchboard.core.workers.block_sizes(model)
            base, adapter = self._switchboard.core.workers.identity(model)
            prompt = await self._prompts.read(scanned, base, sizes, adapter)
            if self._switchboard.core.workers.block_sizes(model) <= sizes:
                break  # else a worker with blocks of another size joined meanwhile
        session = header(terms.session_header) or scanned.session
        if session is not None and len(session) > terms.scan.max_key_chars:
            raise ClientError(400, f"{terms.session_header} is too long", code="string_too_long")
        return self._arrival_of(scanned, prompt, model, session, tenant), prompt

    def _arrival_of(
        self, scanned: Scanned, prompt: Prompt, model: str, session: str | None, tenant: str | None
    ) -> Arrival:
        return Arrival(
            now_s=self._switchboard.clock(),
            request_id=self._switchboard.next_request_id(),
            model=model,
            prompt_tokens=prompt.tokens,
            chains=prompt.chains,
            approximate=prompt.approximate,
            max_output_tokens=scanned.max_output_tokens,
            session=session,
            tenant=tenant,
            priority=scanned.priority,
            stream=scanned.stream,
            longest_prompt_tokens=prompt.longest_tokens,
        )

    def _only_model(self) -> str:
        """A request may leave out the model where there is one only."""
        models = self._switchboard.core.workers.models()
        if len(models) == 1:
            return models[0]
        known = ", ".join(models) or "none yet"
        raise ClientError(400, f"`model` is missing; this router serves: {known}", "model")

    async def _relay(
        self,
        request: web.Request,
        body: bytes,
        arrival: Arrival,
        prompt: Prompt,
        ticket: Ticket,
        explain: Asked,
        entry: Entry | None = None,
    ) -> web.StreamResponse:
        terms = self._terms()
        held: HeldReply | None = None
        while True:
            action = await ticket.next_action()
            if isinstance(action, Reject):
                answer = await self._turned_away(request, action, held)
                if explain in TO_CLIENTS and action.code in HELD_CODES and not answer.prepared:
                    now_s = self._switchboard.clock()
                    choice = self._switchboard.explain(replace(arrival, now_s=now_s))
                    explain_refusal(answer, arrival, now_s, choice)
                if entry is not None:
                    entry.rejected(action, answer.status)
                return answer
            if entry is not None:
                worker = self._switchboard.core.workers.get(action.worker_id)
                entry.dispatched(action, None if worker is None else worker.facts.block_size)
            record = self._decisions.add(arrival, action, self._switchboard.clock())
            member = self._fleet.members.get(action.worker_id)
            if member is None:  # removed since the core chose it
                ticket.fail("busy", retry=True, reason="worker removed")
                continue
            sent = _body_for(member, request.path, body, arrival, prompt, terms)
            headers = reply_headers(action, arrival.request_id, explain)
            reply = ClientReply(request, terms.client_buffer_bytes, headers)
            outcome = await member.upstream.send(
                upstream_request(
                    request,
                    sent,
                    keep_authorization=not self._tenants.asks_keys,
                    rank=member.rank,
                ),
                reply,
                terms.timeouts,
                ticket.first_token if arrival.stream else None,
                ticket.progress if arrival.stream else None,
            )
            self._metrics.outcome(arrival, action, outcome, self._switchboard.clock())
            record.ended(arrival, outcome)
            if entry is not None:
                entry.ended(outcome)
            held = outcome.held or held
            if sent is body:
                self._compare(arrival, prompt, outcome)
            if not self._settle(ticket, action.worker_id, outcome):
                return reply

    def _compare(self, arrival: Arrival, prompt: Prompt, outcome: Outcome) -> None:
        """Hold our count of the prompt's tokens against the worker's."""
        usage = outcome.usage
        if self._check is None or usage is None or outcome.error is not None:
            return
        if prompt.encoded and usage.prompt_tokens is not None:
            self._check.counted(arrival.model, prompt.tokens, usage.prompt_tokens)

    def _settle(self, ticket: Ticket, worker_id: int, outcome: Outcome) -> bool:
        """Tell the core how the dispatch ended; True when another action follows."""
        error = outcome.error
        if error is None:
            usage = outcome.usage or Usage(completion_tokens=outcome.events or None)
            ticket.finish(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            return False
        if isinstance(error, WorkerError):
            log.warning(
                "request %d: worker %d failed (%s): %s%s",
                ticket.request_id,
                worker_id,
                error.kind,
                error.message,
                "; asking for another worker" if outcome.retryable else "",
            )
            ticket.fail(
                "busy" if error.kind == "busy" else "worker",
                retry=outcome.retryable,
                reason=error.kind,
            )
            return outcome.retryable
        ticket.fail("client", retry=False, reason="client left")
        return False

    async def _turned_away(
        self, request: web.Request, reject: Reject, held: HeldReply | None
    ) -> web.StreamResponse:
        """The core's refusal; where workers did answer with an error, the last of these."""
        if held is not None and reject.code == "worker_error":
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


def _body_for(
    member: Member,
    path: str,
    body: bytes,
    arrival: Arrival,
    prompt: Prompt,
    terms: InferenceTerms,
) -> bytes:
    """What this worker is sent: the client's body, or with ids in it instead of the text."""
    recognized = member.recognized
    if not terms.forward_token_ids or recognized is None:
        return body
    if arrival.request_id % _UNCHANGED_EVERY == 0:  # its worker counts the tokens by itself
        return body
    return with_token_ids(body, path, recognized.kind, prompt.encoded)
