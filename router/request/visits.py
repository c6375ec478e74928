"""What the access log tells of a request, noted as it goes along."""

from __future__ import annotations

import itertools
import re
import secrets
from asyncio import CancelledError
from collections.abc import Callable
from types import TracebackType

from aiohttp import web

from policies.facts import Arrival
from router.core.actions import Reject
from router.record.access_log import AccessLine, AccessLog
from router.request.deadlines import CODE as LATE
from router.request.desk import Errand, LocalCase, Named
from router.request.errors import ClientError, WorkerError
from router.server.responses import ClientRequest, Written
from router.tracing.trace import Trace, Traced, TracedCase
from router.upstream.reply import Header, Outcome

ID_HEADER = "x-request-id"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-|$)")
_CLIENT_LEFT = 499
_MODEL_CHARS = 256


class Visit:
    """Lifetime: request, and then until it is written."""

    __slots__ = (
        "_traceparent",
        "_visits",
        "_written",
        "arrival",
        "attempts",
        "began_s",
        "bytes_in",
        "bytes_out",
        "client",
        "code",
        "end_s",
        "errand",
        "events",
        "finish",
        "first_byte_s",
        "id",
        "moved",
        "path",
        "sent_s",
        "status",
        "tenant",
        "traced",
        "usage",
    )  # fmt: skip

    def __init__(
        self, visits: Visits, request: ClientRequest, traced: Traced | None = None
    ) -> None:
        header = request.headers.get
        given = header(ID_HEADER)
        self.id = given if given is not None and _ID.fullmatch(given) else visits.next_id()
        self._traceparent = header("traceparent")
        self.traced = traced
        self.client = request.remote
        self.path = request.path
        self.tenant: str | None = None
        self.arrival: Arrival | None = None
        self.errand: Errand | None = None
        self.usage: tuple[int | None, int | None] = None, None  # completion, cached tokens
        self.status: int | None = None
        self.finish = ""
        self.code: str | None = None
        self.attempts = self.moved = self.bytes_in = self.bytes_out = self.events = 0
        self.sent_s: float | None = None
        self.first_byte_s: float | None = None
        self.began_s = self.end_s = visits.clock()
        self._visits = visits
        self._written: Written | None = request.writer

    def __enter__(self) -> Visit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ClientError):
            self.status, self.finish, self.code = error.status, "rejected", error.code
            error.headers = (*error.headers, (ID_HEADER, self.id))
        elif isinstance(error, (CancelledError, OSError)):
            self.finish = "client_left"
            if self._written is not None:
                self.bytes_out = max(self.bytes_out, self._written.output_size)
        elif error is not None:
            self.status, self.finish = self.status or 500, "internal_error"
            error.add_note(f"request={self.id} trace={self.trace_id or '-'}")  # for the log
        self._written = None  # the line may outlive the connection
        self.end_s = self._visits.clock()
        self._visits.end(self)

    def asks(self, case: LocalCase, arrival: Arrival, bytes_in: int) -> VisitedCase:
        """It was read and understood: `case`, looked at from here."""
        self.arrival, self.bytes_in = arrival, bytes_in
        if isinstance(self.traced, Trace):
            return VisitedCase(TracedCase(case, self.traced), self)
        return VisitedCase(case, self)

    def named(self) -> Named:
        """By what the desk knows it."""
        return Named(self.id, self.trace_id or "", isinstance(self.traced, Trace))

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits: of our own trace, else as the client says."""
        if self.traced is not None:
            return f"{self.traced.trace_id:032x}"
        found = None if self._traceparent is None else _TRACE.match(self._traceparent)
        return None if found is None else found[1]

    def answered(self, answer: web.StreamResponse) -> web.StreamResponse:
        """The answer; one of our own gets the number."""
        if self.code == LATE:  # a worker's status says nothing of an answer that it did not end
            self.status = answer.status
        if isinstance(answer, web.Response) and not answer.prepared:
            answer.headers[ID_HEADER] = self.id
        return answer

    def sent(self, errand: Errand) -> Errand:
        """To a worker; the answer's head gets the number."""
        self.errand = errand
        self.attempts += 1
        if self.sent_s is None:
            self.sent_s = self._visits.clock()
        number: Header = (ID_HEADER.encode(), self.id.encode())
        headers = (*errand.headers, number)
        parts = (errand.carrier, errand.uncached_tokens, errand.wait_s)
        return Errand(errand.worker_id, headers, *parts)

    def ended(self, outcome: Outcome) -> None:
        """At one worker."""
        error = outcome.error
        self.status = outcome.status if outcome.status is not None else self.status
        self.bytes_out += outcome.bytes_to_client
        self.events += outcome.events
        self.moved += outcome.resumable
        if self.first_byte_s is None:
            self.first_byte_s = outcome.first_byte_s
        if outcome.usage is not None:
            self.usage = outcome.usage.completion_tokens, outcome.usage.cached_tokens
        if isinstance(error, WorkerError):
            self.finish = error.kind
        elif error is not None:
            self.finish = LATE if error.code == LATE else "client_left"
            self.code = error.code
        else:
            self.finish = "ok"

    def refused(self, reject: Reject, status: int) -> None:
        """By the core."""
        self.status, self.finish, self.code = status, "rejected", reject.code

    def line(self, unix_offset_s: float) -> AccessLine:
        """For the log's thread."""
        arrival, errand = self.arrival, self.errand
        known = arrival is not None and self.code != "model_not_found"
        prompt = None if arrival is None else arrival.prompt_tokens
        hit = None
        if prompt is not None and errand is not None:
            hit = max(prompt - errand.uncached_tokens, 0)
        streams = arrival is not None and arrival.stream
        return AccessLine(
            at=round(self.began_s + unix_offset_s, 6),
            id=self.id,
            trace=self.trace_id,
            client=self.client,
            tenant=self.tenant,
            path=self.path,
            model=arrival.model[:_MODEL_CHARS] if arrival is not None and known else None,
            stream=streams,
            status=_CLIENT_LEFT if self.status is None else self.status,
            finish=self.finish or "client_left",
            code=self.code,
            worker=None if errand is None else errand.worker_id,
            attempts=self.attempts,
            moved=self.moved,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            prompt_tokens=prompt,
            output_tokens=self.usage[0] or self.events or None,
            expected_hit_tokens=hit,
            cached_tokens=self.usage[1],
            wait_ms=_ms(self.sent_s, self.began_s),
            ttft_ms=_ms(self.first_byte_s, self.began_s) if streams else None,
            total_ms=_ms(self.end_s, self.began_s) or 0.0,
        )


class VisitedCase:
    """A case whose steps are noted. Lifetime: request."""

    __slots__ = ("_case", "_visit", "first_token", "gone", "progress", "request_id", "why_refused")

    def __init__(self, case: LocalCase | TracedCase, visit: Visit) -> None:
        self._case, self._visit = case, visit
        self.request_id = case.request_id
        self.first_token, self.progress = case.first_token, case.progress
        self.gone, self.why_refused = case.gone, case.why_refused

    def __enter__(self) -> VisitedCase:
        self._case.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._case.__exit__(kind, error, trace)

    def arrive(self) -> None:
        """See `LocalCase`."""
        self._case.arrive()

    async def next_errand(self) -> Errand | Reject:
        """See `LocalCase`."""
        errand = await self._case.next_errand()
        return errand if isinstance(errand, Reject) else self._visit.sent(errand)

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Arrival | None = None) -> bool:
        """See `LocalCase`."""
        self._visit.ended(outcome)
        return self._case.ended(outcome, own_tokens, rest)

    def refused(self, reject: Reject, status: int) -> None:
        """See `LocalCase`."""
        self._visit.refused(reject, status)
        self._case.refused(reject, status)


class Visits:
    """Lifetime: process."""

    def __init__(
        self,
        log: AccessLog | None,
        clock: Callable[[], float],
        on_trace: Callable[[Visit], None] | None = None,
    ) -> None:
        """`on_trace` is given traced visits that are over."""
        self._log = log
        self._on_trace = on_trace
        self.clock = clock
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count()

    def keeps(self, traced: Traced | None) -> bool:
        """Whether anything is to be written down of a request."""
        return self._log is not None or isinstance(traced, Trace)

    def visit(self, request: ClientRequest, traced: Traced | None = None) -> Visit:
        """A request begins."""
        return Visit(self, request, traced)

    def end(self, visit: Visit) -> None:
        """It is over."""
        if self._log is not None:
            self._log.put(visit)
        if isinstance(visit.traced, Trace) and self._on_trace is not None:
            self._on_trace(visit)

    def next_id(self) -> str:
        """A number for a request that brings none, which no other router gives."""
        return f"{self._prefix}-{next(self._numbers):x}"


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round(max(at_s - since_s, 0.0) * 1e3, 3)
