"""Charges a request to the quota of its API key, and collects what the logs say about it."""

from __future__ import annotations

import re
from asyncio import CancelledError
from collections.abc import Sequence

from policies.facts import Arrival
from router.core.contract.actions import Reject
from router.fleet.member import Member
from router.http.errors import ClientError
from router.http.messages import Answer, Request, Response
from router.http.reply import Header, Outcome
from router.keys.key_file import KeyTerms
from router.keys.key_ring import Key
from router.keys.quota import Grant
from router.record.named import NamedModel
from router.record.request_record import DEADLINE, Attempt, RequestRecord, refusal_of
from router.request.quotas import tokens_used, too_many
from router.request.service import ID_HEADER, Service

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-|$)")
_NO_KEY_TERMS = KeyTerms()


class Account:
    """Charges one request to its API key's quota and to its tenant, and writes the request's log
    records. Lifetime: request.
    """

    # Most requests change few of these fields, so the class has their first values.
    name: NamedModel | None = None  # the model's name and the rule that changed it
    lost_outcome: Outcome | None = None  # of the worker that a begun stream left
    _key: Key | None = None
    _grant: Grant | None = None  # of a key with limits
    _prompt_tokens = 0
    _read_s: float | None = None
    _decision_started_s: float | None = None  # of a traced request; None: there is no open question
    _answered_s: float | None = None
    _refused: tuple[int, str | None] | None = None
    _late_status: int | None = None

    def __init__(self, service: Service, http: Request) -> None:
        self._service = service
        self._http = http
        self._began_s = service.clock()
        self.trace = None if service.tracer is None else service.tracer.begin(http)
        self.traced = self.trace is not None and self.trace.sampled  # spans are made of it
        # The logs, and so its client, know the request by this text.
        self.has_id = service.access is not None or self.traced
        self.id = service.id_of(http) if self.has_id else ""

    @property
    def terms(self) -> KeyTerms:
        """Return what the request's API key allows, or what is allowed without a key if it has
        none.
        """
        return _NO_KEY_TERMS if self._key is None else self._key.terms

    def trace_id(self) -> str | None:
        """Return the request's trace id as 32 hexadecimal digits, or None if it has no trace id.

        The trace id is that of the router's own trace, or else that of the client's `traceparent`
        header. It is also None if neither the access log nor a trace needs it.
        """
        if not self.has_id:
            return None
        if self.trace is not None:
            return f"{self.trace.trace_id:032x}"
        given = self._http.headers.get("traceparent")
        found = None if given is None else _TRACEPARENT.match(given)
        return None if found is None else found[1]

    # --- the quota of its key -----------------------------------------------------------------

    def identify(self, key: Key) -> None:
        """Charge one request to the quota of `key`, and count the request for the key's tenant.

        Raises ClientError(429) if the quota is exhausted.
        """
        self._key = key
        if key.terms.tenant is not None:
            self._service.counts.arrived(key.terms.tenant)
        if key.allowance is not None:
            grant, now_s = Grant(key.allowance), self._service.clock()
            if (exhausted := grant.begin(now_s)) is not None:
                raise too_many(exhausted, grant.headers(now_s))
            self._grant = grant
        if self.traced:
            self._read_s = self._service.clock()  # its whole body is here

    def refresh_key_terms(self, key: Key) -> None:
        """Use what the request's key allows now, after the key file may have changed. The quota was
        charged before.
        """
        self._key = key

    def spend(self, prompt_tokens: int) -> None:
        """Charge the prompt's tokens to the quota of the request's key.

        Raises ClientError(429) if fewer tokens are left in the quota.
        """
        self._prompt_tokens = prompt_tokens
        if self._grant is not None:
            now_s = self._service.clock()
            if (exhausted := self._grant.spend(now_s, prompt_tokens)) is not None:
                raise too_many(exhausted, self._grant.headers(now_s))

    def used(self, outcome: Outcome) -> None:
        """Charge the tokens of a finished attempt to the tenant and to the quota of the key."""
        tenant = self.terms.tenant
        if tenant is None and self._grant is None:
            return
        tokens = tokens_used(outcome, self._prompt_tokens)
        if tokens is not None:
            if tenant is not None:
                self._service.counts.used(tenant, *tokens)
            if self._grant is not None:
                self._grant.used(self._service.clock(), *tokens)

    # --- decisions ----------------------------------------------------------------------------

    def note_decision_start(self) -> None:
        """Note the time at which the router asks the decision core for a worker, if the request is
        traced.
        """
        if self.traced:
            self._decision_started_s = self._service.clock()

    def decision_started_s(self) -> float | None:
        """Return when the router last asked the decision core for a worker.

        The unit is seconds of the service's clock. Each time is returned only once. Return None if
        the request is not traced, or if the router has not asked again since the last call.
        """
        asked_s = self._decision_started_s
        if self.traced:
            self._decision_started_s = None
        return asked_s

    def begins(self, attempt: Attempt) -> None:
        """Give the attempt a span id, if the request is traced. The worker gets this id as the
        parent of its own spans.
        """
        if self.trace is not None and self.traced:
            assert self._service.tracer is not None, "a traced request has a tracer"
            self.trace.told_id = attempt.span_id = self._service.tracer.span_id()

    def record_destination(self, attempt: Attempt, member: Member) -> None:
        """Record the worker's host and port in the attempt, for its trace span, if one is made."""
        if self.traced:
            attempt.address = member.upstream.host, member.upstream.port

    def rejected(self) -> None:
        """Note the time at which the decision core refused the request, if the request is
        traced.
        """
        if self.traced:
            self._answered_s = self._service.clock()

    def refused(self, reject: Reject, status: int, *, begun: bool = False) -> None:
        """Record that the decision core refused the request; `status` is the HTTP status that the
        client got.

        `begun` True means that the client had already received a part of an answer. Then the tokens
        of this part are charged, and the tenant's count of refusals does not grow.
        """
        self._refused = status, reject.code
        if not begun:
            self._service.counts.refused(self.terms.tenant, reject.code)
        elif self.lost_outcome is not None:
            self.used(self.lost_outcome)

    # --- its answer ---------------------------------------------------------------------------

    def headers(self) -> tuple[Header, ...]:
        """Return the headers that the router adds to the answer: the request's id and what is left
        of its quota.
        """
        headers: tuple[Header, ...] = ()
        if self.has_id:
            headers = ((ID_HEADER.encode(), self.id.encode()),)
        if self._grant is not None:
            left = self._grant.headers(self._service.clock())
            headers = (*headers, *((name.encode(), value.encode()) for name, value in left))
        return headers

    def answered(self, answer: Answer, attempts: Sequence[Attempt]) -> Answer:
        """Return `answer`. If the router wrote it itself, add the request's id to its headers."""
        if self.has_id:
            if attempts and attempts[-1].code == DEADLINE:
                self._late_status = answer.status
            if isinstance(answer, Response):
                answer.headers[ID_HEADER] = self.id
        return answer

    # --- its end ------------------------------------------------------------------------------

    def close(
        self,
        error: BaseException | None,
        arrival: Arrival | None,
        attempts: Sequence[Attempt],
        body: bytes,
    ) -> None:
        """Record the end of the request in the quota and in the logs.

        `error` is the exception that ended the request, or None. `arrival` describes the request as
        the decision core got it, or is None if it was not submitted to the core.
        """
        service = self._service
        if self._grant is not None:
            self._grant.end(service.clock())
        if self._key is not None and isinstance(error, ClientError):
            service.counts.refused(self.terms.tenant, error.code or str(error.status))
        written = self.has_id or (service.request_log is not None and arrival is not None)
        if written or self.name is not None:
            record = self._record(error, arrival, attempts, len(body))
            if self.name is not None and service.names is not None:
                service.names.count(record)
            if written:
                service.write(record)

    def _record(
        self,
        error: BaseException | None,
        arrival: Arrival | None,
        attempts: Sequence[Attempt],
        body_bytes: int,
    ) -> RequestRecord:
        http = self._http
        record = RequestRecord(
            self._began_s,
            self._service.clock(),
            arrival,
            attempts,
            self.id,
            self.trace,
            self.trace_id(),
            http.remote,
            self.terms.tenant,
            http.path,
            body_bytes,
            read_s=self._read_s,
            decision_started_s=self._decision_started_s,
            answered_s=self._answered_s,
            refused=refusal_of(error) or self._refused,
            late_status=self._late_status,
            name=self.name,
        )
        if isinstance(error, ClientError):
            if self.has_id:
                error.headers = (*error.headers, (ID_HEADER, self.id))
        elif isinstance(error, (CancelledError, OSError)):
            record.broke = "client_left"
            record.written_bytes = http.written_bytes
        elif error is not None:
            record.broke = "internal_error"
            if self.has_id:  # for the log
                error.add_note(f"request={self.id} trace={record.trace_id or '-'}")
        return record
