"""One inference request, from its head to the last byte of its answer."""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from dataclasses import replace
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from policies.facts import Arrival, Role
from router.body.legs import PREFILLER, SIDECAR
from router.body.paths import OTHER, PATHS, Path
from router.core.contract.actions import Dispatch, Reject
from router.core.placement.retries import NO_MODEL
from router.fleet.member import Member
from router.http.errors import ClientError, WorkerError
from router.http.messages import Answer, Request, Response
from router.http.reply import Header, Outcome, Sends, Usage
from router.keys.key_file import KeyTerms
from router.keys.key_ring import Key
from router.keys.quota import Grant
from router.record.explain import (
    EXPLAIN_HEADER,
    HELD_CODES,
    HELD_HEADER,
    TO_CLIENTS,
    WORKER_HEADER,
    Asked,
    explanation_line,
    refusal_line,
)
from router.record.logs import about
from router.record.request_record import DEADLINE, Attempt, RequestRecord, refusal_of
from router.request.dialect import Target
from router.request.dispatcher import Ticket
from router.request.prompts import Prompt
from router.request.quotas import tokens_used, too_many
from router.request.service import ID_HEADER, Service
from router.upstream.client_reply import ClientReply, Reply

_DRAINING = "draining"  # a rejection's code
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-|$)")
_NOBODY = KeyTerms()
Whose = Literal["answer", "prefill", "pair"]  # as of `Failure.leg`
# A prompt whose own log probabilities are wanted is computed whole, whatever is cached: vLLM
# (`sampling_params.py`) and SGLang do not look then. Found in text, too: no harm is done.
_COMPUTED_WHOLE = (b"prompt_logprobs", b"logprob_start_len", b'"echo"')
# More than one answer is wanted. Found in a tool's schema, too: then one figure is left out.
_SEVERAL = re.compile(rb'"(?:n|best_of)"[ \t\r\n]*:[ \t\r\n]*(?:[2-9]|1[0-9])')

log = logging.getLogger(__name__)


def _blame(error: WorkerError) -> Literal["busy", "worker"]:
    """Whether a worker's error speaks of its health."""
    return "busy" if error.kind in ("busy", "out_of_files", "moved", "no_model") else "worker"


def is_own_hit(body: bytes, leg: Role) -> bool:
    """Whether `cached_tokens` of an answer to `body` tell what its worker's cache held of it.

    Of several answers vLLM (0.32) reports what a later one found, the prompt that the first had
    just computed. One that decodes what another worker prefilled reports that worker's hit.
    """
    if leg == "decode":
        return False
    asks = b'"n"' in body or b'"best_of"' in body  # a tenth of the time of the expression
    return not (asks and _SEVERAL.search(body))


class InferenceRequest(Ticket):
    """A context manager around the whole request. Lifetime: request.

    It grows: `identify` notes its API key, `ask` brings it before the core once it is read, each
    `next_attempt` is one try at a worker and `ended` its outcome. Whatever happens, leaving it
    tells the core and its key's quota its end once, and hands its record to the logs.
    """

    __slots__ = (
        "_answered_s",
        "_asked_s",
        "_began_s",
        "_explain",
        "_grant",
        "_id",
        "_kept",
        "_key",
        "_late_status",
        "_lost",
        "_prefiller",
        "_prompt_tokens",
        "_read_s",
        "_refused",
        "_service",
        "arrival",
        "attempts",
        "beside",
        "body",
        "http",
        "path",
        "prompt",
        "trace",
    )  # fmt: skip

    arrival: Arrival  # these three once it is read
    prompt: Prompt
    body: bytes

    def __init__(self, service: Service, http: Request) -> None:
        super().__init__(service.dispatcher)
        self.http = http
        self.path: Path = OTHER
        self.attempts: list[Attempt] = []
        self.beside: Attempt | None = None  # the prefill that began with the latest attempt
        self._prefiller: Attempt | None = None  # the same, begun by the worker that decodes
        self.trace = None if service.tracer is None else service.tracer.begin(http)
        self._service = service
        self._began_s = service.clock()
        # Somebody writes it down with the number it is known by outside.
        self._kept = service.access is not None or self.traced
        self._id = service.id_of(http) if self._kept else ""
        self._key: Key | None = None
        self._grant: Grant | None = None  # of a key with limits
        self._prompt_tokens = 0
        self._explain: Asked = "no"
        self._read_s: float | None = None
        self._asked_s: float | None = None  # of a traced request; None: there is no open question
        self._answered_s: float | None = None
        self._lost: Outcome | None = None  # of the worker that a begun stream left
        self._refused: tuple[int, str | None] | None = None
        self._late_status: int | None = None

    def __enter__(self) -> InferenceRequest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._settle_quota(error)
            service = self._service
            if self._kept or (service.request_log is not None and self.request_id >= 0):
                service.write(self._record(error))

    @property
    def traced(self) -> bool:
        """Spans are made of it."""
        return self.trace is not None and self.trace.sampled

    @property
    def runs_on(self) -> bool:
        return self.prompt.runs_on

    @property
    def terms(self) -> KeyTerms:
        """What its key allows."""
        return _NOBODY if self._key is None else self._key.terms

    # --- its key's quota ----------------------------------------------------------------------

    def identify(self, key: Key) -> None:
        """It is this key's. Raises ClientError(429) while the key may send nothing."""
        self._key = key
        if key.terms.tenant is not None:
            self._service.counts.arrived(key.terms.tenant)
        if key.allowance is not None:
            grant, now_s = Grant(key.allowance), self._service.clock()
            if (exhausted := grant.begin(now_s)) is not None:
                raise too_many(exhausted, grant.headers(now_s))
            self._grant = grant

    def spend(self, prompt_tokens: int) -> None:
        """Its prompt has so many tokens. Raises ClientError(429) where these are too many now."""
        self._prompt_tokens = prompt_tokens
        if self._grant is not None:
            now_s = self._service.clock()
            if (exhausted := self._grant.spend(now_s, prompt_tokens)) is not None:
                raise too_many(exhausted, self._grant.headers(now_s))

    def _use(self, outcome: Outcome) -> None:
        """A worker has dealt with it."""
        tokens = tokens_used(outcome, self._prompt_tokens)
        if tokens is not None:
            if (tenant := self.terms.tenant) is not None:
                self._service.counts.used(tenant, *tokens)
            if self._grant is not None:
                self._grant.used(self._service.clock(), *tokens)

    def _settle_quota(self, error: BaseException | None) -> None:
        if self._grant is not None:
            self._grant.end(self._service.clock())
        if self._key is not None and isinstance(error, ClientError):
            self._service.counts.refused(self.terms.tenant, error.code or str(error.status))

    # --- decisions ----------------------------------------------------------------------------

    def path_of(self, target: Target | None) -> Path:
        """The row of the table of paths; `target`: the inference that a path of a dialect names."""
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def was_read(self, body: bytes, path: Path) -> None:
        """The whole body is there."""
        self.body, self.path = body, path
        if self.traced:
            self._read_s = self._service.clock()

    def understood(self, body: bytes, arrival: Arrival, prompt: Prompt, explain: Asked) -> None:
        """What it asks for: `body` goes to the worker, `arrival` before the core."""
        self.body, self.arrival, self.prompt, self._explain = body, arrival, prompt, explain

    def ask(self) -> None:
        """Bring it before the core, which decides now or later."""
        service, arrival = self._service, self.arrival
        self._ask_s()
        explained = self._explain != "no" or self.traced
        if service.draining and service.refuses():
            self.enter(arrival.request_id, explained)
            counters, settings = (
                service.dispatcher.core.counters,
                service.dispatcher.core.settings,
            )
            counters.rejections[_DRAINING] += 1
            why = "the router is draining"
            self.put(Reject(self.request_id, 503, _DRAINING, why, settings.retry_after_s))
        else:
            self.arrive(arrival, explained)

    async def next_attempt(self) -> Attempt | Reject:
        """Where to send it, or how to turn it away; waits while it is held."""
        action = await self.next_action()
        return self._rejected(action) if isinstance(action, Reject) else self.dispatched(action)

    def dispatched(self, action: Dispatch) -> Attempt:
        """The core's choice, noted. Of two legs at once the first is `beside`, unless a sidecar of
        the worker that answers begins it.
        """
        self.beside = self._prefiller = None
        if action.prefill is not None:
            self.beside = self._noted(
                replace(action, stages=action.stages[:1], decision=action.prefill, prefill=None)
            )
            member = self._service.fleet.members.get(action.worker_id)
            if member is not None and member.transfer == SIDECAR:
                self._prefiller, self.beside = self.beside, None
        return self._noted(action)

    def _noted(self, action: Dispatch) -> Attempt:
        service = self._service
        worker = service.dispatcher.core.workers.get(action.worker_id)
        size = None if worker is None else worker.facts.block_size
        attempt = Attempt(self.arrival, action, service.clock(), self._asked_s, size)
        if self.trace is not None and self.traced:
            assert service.tracer is not None, "whoever traces has a tracer"
            self._asked_s = None
            self.trace.told_id = attempt.span_id = service.tracer.span_id()
        self.attempts.append(attempt)
        attempt.routed_by = self.prompt.routed_by
        if (sequence := self.prompt.sequence) is not None:
            of = attempt.model, attempt.tenant, sequence
            service.sequences.sent(*of, attempt.worker_id)
        service.latest.add(attempt)
        return attempt

    def member(self, attempt: Attempt) -> Member | None:
        """The attempt's worker; None: it is gone since it was chosen."""
        member = self._service.fleet.members.get(attempt.worker_id)
        if member is not None and self.traced:
            attempt.address = member.upstream.host, member.upstream.port
        return member

    def first_leg_ended(self, outcome: Outcome) -> None:
        """A worker has prefilled it for another one; another attempt follows."""
        service, attempt = self._service, self.attempts[-1]
        now_s = service.clock()
        service.metrics.requests.prefilled(attempt.worker_id, outcome, now_s)
        attempt.end(outcome, now_s)
        self._ask_s()
        self.prefilled(None if outcome.usage is None else outcome.usage.cached_tokens)

    def beside_ended(self, outcome: Outcome) -> None:
        """The prefill that began with the answer's leg is over."""
        service, attempt = self._service, self.beside
        assert attempt is not None, "of two legs"
        now_s, error = service.clock(), outcome.error
        if error is None and outcome.answers:
            service.metrics.requests.prefilled(attempt.worker_id, outcome, now_s)
            attempt.end(outcome, now_s)
            self.prefilled(None if outcome.usage is None else outcome.usage.cached_tokens)
            return
        service.metrics.requests.ended(self.arrival, attempt.worker_id, outcome, now_s)
        attempt.end(outcome, now_s)
        kind = error.kind if isinstance(error, WorkerError) else f"status {outcome.status}"
        extra = about(self._id, self._trace_id() or "")
        line = "request %d: worker %d failed (%s) when its KV had been fetched"
        log.warning(line, self.request_id, attempt.worker_id, kind, extra=extra)
        blame: Literal["busy", "worker"] = "busy"
        busy_s = None
        if isinstance(error, WorkerError):
            blame, busy_s = _blame(error), error.busy_s
        self.fail(blame, retry=False, reason=kind, leg="prefill", busy_s=busy_s)

    def leg_headers(self) -> tuple[Header, ...]:
        """By which two workers know it for the same request, but where its client named it; and by
        which a sidecar knows who prefills.
        """
        headers: tuple[Header, ...] = ()
        if self._prefiller is not None:
            member = self._service.fleet.members.get(self._prefiller.worker_id)
            if member is not None:  # else the worker that decodes does all of it
                headers = ((PREFILLER, urlsplit(member.spec.url).netloc.encode()),)
        if self.http.headers.get(ID_HEADER) is not None:
            return headers
        number = self._id or f"warmroute-{self.request_id}"
        return (*headers, (ID_HEADER.encode(), number.encode()))

    def prefilled_beside(self) -> None:
        """An answer begins, so a prefill that a sidecar has begun is over; else nothing is."""
        prefiller, self._prefiller = self._prefiller, None
        if prefiller is not None:
            now_s = self._service.clock()
            prefiller.end(Outcome(prefiller.sent_s, status=200, first_byte_s=now_s), now_s)
            self.prefilled(None)

    def gone(self, whose: Whose = "answer") -> None:
        """The attempt's worker is gone: nothing was sent. Another attempt follows."""
        self._ask_s()
        self.fail("busy", retry=True, reason="worker removed", leg=whose)

    def ended(
        self,
        outcome: Outcome,
        own_tokens: int | None,
        rest: Arrival | None = None,
        whose: Whose = "answer",
    ) -> bool:
        """The latest attempt is over; True when another one follows.

        `own_tokens`: our exact count of the prompt's tokens, to be held against the worker's.
        `rest`: what is left of the request where the outcome is resumable. `whose`: of two legs
        at once, both of which are over.
        """
        service, attempt = self._service, self.attempts[-1]
        if whose == "prefill" and self.beside is not None:
            attempt.ended_s = service.clock()
            attempt = self.beside
        now_s = service.clock()
        if outcome.kept:
            outcome.usage = self._told(outcome, attempt) or outcome.usage
            outcome.kept = b""  # else its text would live as long as its attempt is remembered
        usage = outcome.usage
        if usage is not None and usage.cached_tokens is not None:
            own = is_own_hit(self.body, attempt.leg)
            outcome.usage = usage if own else replace(usage, cached_tokens=None)
        if outcome.error is None and outcome.answers:
            self.prefilled_beside()
        service.metrics.requests.ended(self.arrival, attempt.worker_id, outcome, now_s)
        attempt.end(outcome, now_s)
        self._compare(outcome, own_tokens)
        if outcome.resumable:
            self._lost = outcome
        follows = self._settle(attempt.worker_id, outcome, rest, whose)
        if follows:
            self._ask_s()
        else:
            self._use(outcome)
        return follows

    def _told(self, outcome: Outcome, attempt: Attempt) -> Usage | None:
        """The tokens that an answer of a protocol beside OpenAI's reports; None: of OpenAI's."""
        if (answers := self.path.answers) is None:
            return None
        member = self._service.fleet.members.get(attempt.worker_id)
        known = None if member is None else member.recognized
        size = None if known is None else known.kv_block_tokens
        return answers.usage(outcome.kept, outcome.events, size)

    def _ask_s(self) -> None:
        if self.traced:
            self._asked_s = self._service.clock()

    def _compare(self, outcome: Outcome, own_tokens: int | None) -> None:
        """Hold our count of the prompt's tokens against the worker's."""
        check, usage = self._service.check, outcome.usage
        if check is None or own_tokens is None or usage is None or outcome.error is not None:
            return
        if usage.prompt_tokens is not None:
            check.counted(self.arrival.model, own_tokens, usage.prompt_tokens)

    def _settle(self, worker_id: int, outcome: Outcome, rest: Arrival | None, whose: Whose) -> bool:
        """Tell the core how the dispatch ended; True when another action follows."""
        error = outcome.error
        if error is None:
            usage = outcome.usage or Usage(completion_tokens=outcome.events or None)
            if self._service.fleet.denials and outcome.answers:
                self._service.fleet.has_model(worker_id, self.arrival.model)
            counts = (usage.prompt_tokens, self._cached_tokens(usage), usage.completion_tokens)
            self.finish(*counts, refused=not outcome.answers)
            return False
        if isinstance(error, ClientError):
            self.fail("client", retry=False, reason="client left")
            return False
        if error.kind == "absent":
            self._service.fleet.lacks(worker_id, self.arrival.needs)
            self.fail("busy", retry=outcome.retryable, reason="absent")
            return outcome.retryable
        if error.kind == NO_MODEL:
            self._service.fleet.denied(worker_id, self.arrival.model)
            self.fail("busy", retry=outcome.retryable, reason=NO_MODEL, rest=rest, leg=whose)
            return outcome.retryable
        extra = about(self._id, self._trace_id() or "")
        if error.busy_s is not None:
            pass  # the core says so once, and not for each request
        elif error.kind == "out_of_files":
            line = "request %d: not sent to worker %d, no more files may be open here: %s"
            log.error(line, self.request_id, worker_id, error.message, extra=extra)
        else:
            log.warning(
                "request %d: worker %d failed (%s): %s%s",
                self.request_id,
                worker_id,
                error.kind,
                error.message,
                "; asking for another worker" if outcome.retryable else "",
                extra=extra,
            )
        self.fail(
            _blame(error),
            retry=outcome.retryable,
            reason=error.kind,
            rest=rest,
            leg=whose,
            busy_s=error.busy_s,
        )
        return outcome.retryable

    def _cached_tokens(self, usage: Usage) -> int | None:
        """What the worker found in its cache; None where it did not look, or says nothing."""
        cached, prompt = usage.cached_tokens, usage.prompt_tokens
        if cached is None or prompt is None or 2 * cached >= prompt:
            return cached
        return None if any(word in self.body for word in _COMPUTED_WHOLE) else cached

    # --- what its client gets -----------------------------------------------------------------

    def upstream(self, member: Member) -> Sends:
        """By which it goes to a worker."""
        return member.upstream

    @property
    def moves(self) -> bool:
        """Its answer may go on at another worker, from where the router has written it."""
        return True

    def reply(self, buffer_bytes: int, extra_headers: tuple[Header, ...] = ()) -> Reply:
        """Where a worker's answer goes, as of `ClientReply`."""
        return ClientReply(self.http, buffer_bytes, extra_headers)

    def headers(self, attempt: Attempt) -> tuple[Header, ...]:
        """What the router adds to the worker's answer."""
        headers: tuple[Header, ...] = ((WORKER_HEADER, b"%d" % attempt.worker_id),)
        if attempt.decision.reason == "held":
            held_ms = max(attempt.sent_s - attempt.arrived_s, 0.0) * 1e3
            headers = (*headers, (HELD_HEADER, b"%d" % round(held_ms)))
        if self._explain in TO_CLIENTS:
            shown = attempt.request_id, attempt.worker_id, attempt.decision
            full, first = self._explain == "full", self._prefill_for(attempt)
            prefill = None if first is None else (first.worker_id, first.decision)
            line = explanation_line(*shown, full, attempt.routed_by, prefill)
            headers = (*headers, (EXPLAIN_HEADER.encode(), line))
        if self._kept:
            headers = (*headers, (ID_HEADER.encode(), self._id.encode()))
        if self._grant is not None:
            left = self._grant.headers(self._service.clock())
            headers = (*headers, *((name.encode(), value.encode()) for name, value in left))
        return headers

    def _prefill_for(self, attempt: Attempt) -> Attempt | None:
        """The first leg whose KV the latest attempt decodes: it was noted just before."""
        before = self.attempts[-2] if attempt.leg == "decode" and len(self.attempts) > 1 else None
        return before if before is not None and before.leg == "prefill" else None

    def turned_away(self, reject: Reject, status: int, *, begun: bool = False) -> None:
        """The client was told so with `status`; `begun`: in the middle of an answer."""
        self._refused = status, reject.code
        if not begun:
            self._service.counts.refused(self.terms.tenant, reject.code)
        elif self._lost is not None:
            self._use(self._lost)

    def why_refused(self, reject: Reject) -> str | None:
        """The explanation's line for a refusal's header; None where there is none to give."""
        if self._explain not in TO_CLIENTS or reject.code not in HELD_CODES:
            return None
        now_s = self._service.clock()
        choice = self._service.dispatcher.explain(replace(self.arrival, now_s=now_s))
        return refusal_line(self.arrival, now_s, choice)

    def answered(self, answer: Answer) -> Answer:
        """The answer; one of our own gets the number."""
        if self._kept:
            if self.attempts and self.attempts[-1].code == DEADLINE:
                self._late_status = answer.status
            if isinstance(answer, Response):
                answer.headers[ID_HEADER] = self._id
        return answer

    # --- its end ------------------------------------------------------------------------------

    def _rejected(self, reject: Reject) -> Reject:
        if self.traced:
            self._answered_s = self._service.clock()
        return reject

    def _trace_id(self) -> str | None:
        """32 hexadecimal digits: of our own trace, else as the client says."""
        if not self._kept:
            return None
        if self.trace is not None:
            return f"{self.trace.trace_id:032x}"
        given = self.http.headers.get("traceparent")
        found = None if given is None else _TRACE.match(given)
        return None if found is None else found[1]

    def _record(self, error: BaseException | None) -> RequestRecord:
        """What is written down of it; `error` ended its handler."""
        http, arrived = self.http, self.request_id >= 0
        record = RequestRecord(
            self._began_s,
            self._service.clock(),
            self.arrival if arrived else None,
            self.attempts,
            self._id,
            self.trace,
            self._trace_id(),
            http.remote,
            self.terms.tenant,
            http.path,
            len(self.body) if arrived else 0,
            read_s=self._read_s,
            asked_s=self._asked_s,
            answered_s=self._answered_s,
            refused=refusal_of(error) or self._refused,
            late_status=self._late_status,
        )
        if isinstance(error, ClientError):
            error.headers = (*error.headers, (ID_HEADER, self._id)) if self._kept else error.headers
        elif isinstance(error, (CancelledError, OSError)):
            record.broke = "client_left"
            record.written_bytes = http.written_bytes
        elif error is not None:
            record.broke = "internal_error"
            if self._kept:  # for the log
                error.add_note(f"request={self._id} trace={record.trace_id or '-'}")
        return record
