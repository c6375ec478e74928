"""Makes OpenTelemetry spans of a trace: one span for the request, and one for each of its steps.

    POST /v1/chat/completions          server; the caller's child
    +- tokenize                        the prompt's ids and hashes
    +- queue                           held at the router, if it was
    +- decide                          which worker and why, with the runner-up and the regret
    +- dispatch                        client; the worker's parent; one for each attempt

Attributes have OpenTelemetry's names where it defines one (http, gen_ai, server, error), else
`warmroute.*`. None of them holds text of a prompt or answer, a key, or a client's address.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from router.core.contract.actions import regret_s
from router.http.reply import Outcome
from router.record.access_log import AccessLine, line_of, unix_offset_s
from router.record.explain import HELD_CODES, explanation
from router.record.request_record import Attempt, RequestRecord
from router.record.trace import Trace, span_id_of

# Most attempts shown of a request that migrates often: further ones are only counted.
_MAX_TRIES = 32
_HELD = "held"  # a decision's reason
_MAX_CHARS = 256
_SCOPE = InstrumentationScope("warmroute")
Attributes = dict[str, str | bool | int | float]


class SpanMaker:
    """Makes OpenTelemetry spans from the records of requests. Lifetime: process."""

    def __init__(self, service_name: str) -> None:
        self._resource = Resource.create({"service.name": service_name})
        self._offset_s = unix_offset_s()  # computed again for each request
        self._draw = random.Random()

    def spans(self, record: RequestRecord) -> list[ReadableSpan]:
        """Return the spans of a traced request that has ended, the span of the whole
        request first.
        """
        trace = record.trace
        assert trace is not None, "only what is traced comes here"
        self._offset_s = unix_offset_s()
        line = line_of(record, self._offset_s)
        left_out = max(
            len(record.attempts) + (record.decision_started_s is not None) - _MAX_TRIES, 0
        )
        spans = [self._request(trace, line, record, left_out)]
        if record.read_s is not None and (arrival := record.arrival) is not None:
            told: Attributes = {
                "warmroute.prompt_tokens": arrival.prompt_tokens,
                "warmroute.approximate": arrival.approximate,
            }
            spans.append(self._child(trace, "tokenize", record.read_s, arrival.now_s, told))
        resends = 0  # the second leg of a request is none
        for attempt in _shown(record):
            spans += self._of_attempt(trace, attempt, resends, record.end_s)
            resends += not attempt.prefilled
        if record.decision_started_s is not None:
            spans.append(self._unanswered(trace, record, record.decision_started_s))
        return spans

    def _unanswered(
        self, trace: Trace, record: RequestRecord, decision_started_s: float
    ) -> ReadableSpan:
        """Return the span of a wait in the queue, or of a decision, that found no worker."""
        code = None if record.answered_s is None or record.refused is None else record.refused[1]
        waited = code is None or code in HELD_CODES
        ended_s = record.end_s if record.answered_s is None else record.answered_s
        why: Attributes = {"warmroute.code": code or "given_up"}
        return self._child(trace, "queue" if waited else "decide", decision_started_s, ended_s, why)

    def _of_attempt(
        self, trace: Trace, attempt: Attempt, resends: int, end_s: float
    ) -> Iterator[ReadableSpan]:
        """Yield the spans of one attempt: its wait in the queue, the decision and the dispatch."""
        begun_s = attempt.decision_started_s
        if attempt.decision.reason == _HELD:
            yield self._child(trace, "queue", begun_s, attempt.sent_s, {})
            begun_s = attempt.sent_s
        yield self._child(trace, "decide", begun_s, attempt.sent_s, _decision(attempt))
        if attempt.address is not None:
            yield self._dispatch(trace, attempt, resends, end_s)

    def _dispatch(self, trace: Trace, attempt: Attempt, resends: int, end_s: float) -> ReadableSpan:
        outcome = attempt.outcome
        assert attempt.address is not None
        about: Attributes = {
            "server.address": attempt.address[0],
            "server.port": attempt.address[1],
            "warmroute.worker": attempt.worker_id,
            "warmroute.uncached_tokens": attempt.uncached_tokens,
        }
        if attempt.leg != "both":
            about["warmroute.leg"] = attempt.leg
        if resends:
            about["http.request.resend_count"] = resends
        if outcome is None:  # the client left, or a defect of ours ended it
            started_s, ended_s = attempt.sent_s, end_s
        else:
            about |= _outcome(attempt, outcome)
            started_s, ended_s = outcome.started_s, attempt.ended_s or end_s
        events = []
        if outcome is not None and (first_s := _first_s(outcome)) is not None:
            events.append(Event("first token", timestamp=self._ns(first_s)))
        return ReadableSpan(
            "dispatch",
            _context(trace, attempt.span_id),
            _context(trace, trace.span_id),
            self._resource,
            about,
            events,
            kind=SpanKind.CLIENT,
            status=_status(attempt.by_worker),
            start_time=self._ns(started_s),
            end_time=self._ns(max(ended_s, started_s)),
            instrumentation_scope=_SCOPE,
        )

    def _request(
        self, trace: Trace, line: AccessLine, record: RequestRecord, left_out: int
    ) -> ReadableSpan:
        began_s, end_s = record.began_s, record.end_s
        path = line.path[:_MAX_CHARS]
        told: dict[str, Any] = {
            "http.request.method": "POST",
            "url.path": path,
            "http.response.status_code": line.status,
            "gen_ai.request.model": line.model,
            **_names(record),
            "gen_ai.usage.input_tokens": line.prompt_tokens,
            "gen_ai.usage.output_tokens": line.output_tokens,
            "warmroute.request_id": line.id,
            "warmroute.stream": line.stream,
            "warmroute.finish": line.finish,
            "warmroute.blame": _fault_of(line),
            "warmroute.code": line.code,
            "warmroute.worker": line.worker,
            "warmroute.attempts": line.attempts,
            "warmroute.migrations": line.moved,
            "warmroute.expected_hit_tokens": line.expected_hit_tokens,
            "warmroute.cached_tokens": line.cached_tokens,
            "warmroute.turns_left_out": left_out or None,
        }
        events = []
        if line.ttft_ms is not None:
            events.append(Event("first token", timestamp=self._ns(began_s + line.ttft_ms / 1e3)))
        return ReadableSpan(
            f"POST {path}",
            _context(trace, trace.span_id),
            _context(trace, trace.parent_id, remote=True) if trace.parent_id else None,
            self._resource,
            {name: _cut(value) for name, value in told.items() if value is not None},
            events,
            kind=SpanKind.SERVER,
            status=_status(_fault_of(line) in ("worker", "router")),
            start_time=self._ns(began_s),
            end_time=self._ns(end_s),
            instrumentation_scope=_SCOPE,
        )

    def _child(
        self, trace: Trace, name: str, start_s: float, end_s: float, about: Attributes
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            _context(trace, span_id_of(self._draw)),
            _context(trace, trace.span_id),
            self._resource,
            about,
            start_time=self._ns(start_s),
            end_time=self._ns(max(end_s, start_s)),
            instrumentation_scope=_SCOPE,
        )

    def _ns(self, at_s: float) -> int:
        return round((at_s + self._offset_s) * 1e9)


def _names(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a request to whose model name a rule applied: the requested name and
    the model that answers.
    """
    name = record.name
    if name is None:
        return {}
    return {
        "gen_ai.request.model": name.asked,
        "gen_ai.response.model": name.model,
        "warmroute.name.rule": name.rule,
        "warmroute.name.target": name.target,
    }


def _context(trace: Trace, span_id: int, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else None
    return SpanContext(trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED), state)


def _shown(record: RequestRecord) -> Sequence[Attempt]:
    """Return the attempts that get spans: all of them, or if there are very many, the first ones
    and the last.
    """
    room = _MAX_TRIES - (record.decision_started_s is not None)
    if len(record.attempts) <= room:
        return record.attempts
    return (*record.attempts[: room - 1], record.attempts[-1])


def _first_s(outcome: Outcome) -> float | None:
    """Return when the answer's first token arrived, or None."""
    return (outcome.first_token_s or outcome.first_byte_s) if outcome.answers else None


def _decision(attempt: Attempt) -> Attributes:
    decision = explanation(attempt.request_id, attempt.worker_id, attempt.decision)
    told: dict[str, Any] = {
        f"warmroute.{name}": decision[name]
        for name in ("worker", "policy", "reason", "expected_hit_tokens", "prompt_tokens")
    }
    told |= {f"warmroute.{name}": decision[name] for name in ("held_s", "standing")}
    told["warmroute.cost_unit"] = decision["unit"]
    for prefix, one in zip(("warmroute.", "warmroute.runner_up."), decision["best"], strict=False):
        told |= {f"{prefix}{name}": one[name] for name in ("worker", "cost", "hit_tokens")}
        told |= {f"{prefix}term.{name}": value for name, value in one.get("terms", {}).items()}
    outcome = attempt.outcome
    if outcome is not None:
        first_s = _first_s(outcome)
        waited_s = None if first_s is None else first_s - outcome.started_s
        told["warmroute.regret_s"] = regret_s(attempt.decision, waited_s)
        told["warmroute.regret_hit_tokens"] = attempt.regret_hit_tokens
    return {name: _cut(value) for name, value in told.items() if _is_exportable(value)}


def _outcome(attempt: Attempt, outcome: Outcome) -> Attributes:
    usage = outcome.usage
    told: dict[str, Any] = {
        "http.response.status_code": outcome.status,
        "warmroute.resumable": outcome.resumable or None,
        "warmroute.events": outcome.events or None,
        "warmroute.relay": "python" if outcome.fallback_reason else "native",
        "error.type": attempt.error,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "warmroute.cached_tokens": attempt.cached_tokens,
    }
    return {name: value for name, value in told.items() if value is not None}


def _is_exportable(value: Any) -> bool:
    """Return whether an attribute with this value is written: it is not None, infinite or NaN."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _fault_of(line: AccessLine) -> str:
    """Return who caused the failure of a request: "client", "router" or "worker"; "none" if it
    succeeded.
    """
    if line.finish == "ok":
        return "client" if 400 <= line.status < 500 else "none"
    if line.finish == "internal_error":
        return "router"
    if line.finish in ("client_left", "deadline_exceeded"):
        return "client"
    if line.finish == "rejected":
        ours = "worker" if line.attempts else "router"
        return "client" if line.status < 500 else ours
    return "worker"


def _status(wrong: bool) -> Status:
    return Status(StatusCode.ERROR if wrong else StatusCode.UNSET)


def _cut(value: Any) -> Any:
    return value[:_MAX_CHARS] if isinstance(value, str) else value
