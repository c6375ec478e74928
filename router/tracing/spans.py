"""A trace as OpenTelemetry's spans: one for the request, and one for each of its steps.

    POST /v1/chat/completions          server; the caller's child
    +- tokenize                        the prompt's ids and hashes
    +- queue                           held at the router, where it was
    +- decide                          which worker and why, with the runner-up and the regret
    +- dispatch                        client; the worker's parent; one for each attempt

Names of attributes are OpenTelemetry's where it has some (http, gen_ai, server, error), else
`warmroute.*`. No text of a prompt or answer, no key, no address of a client is among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from router.core.actions import SECONDS
from router.record.access_log import AccessLine
from router.request.explain import HELD_CODES
from router.tracing.trace import Told, Trace, Turn, span_id_of

if TYPE_CHECKING:
    from router.request.visits import Visit

_HELD = "held"  # a decision's reason
_MAX_CHARS = 256
_SCOPE = InstrumentationScope("warmroute")
Attributes = dict[str, str | bool | int | float]


class SpanMaker:
    """Lifetime: process."""

    def __init__(self, service_name: str, unix_offset_s: float) -> None:
        """`unix_offset_s`: what the router's clock lacks to unix time."""
        self._resource = Resource.create({"service.name": service_name})
        self._offset_s = unix_offset_s
        self._draw = random.Random()

    def spans(self, visit: Visit) -> list[ReadableSpan]:
        """Of a traced visit that is over, the request's own first."""
        trace = visit.traced
        assert isinstance(trace, Trace), "only what is traced comes here"
        line = visit.line(self._offset_s)
        spans = [self._request(trace, line, visit.began_s, visit.end_s)]
        if trace.read_s is not None and (arrival := visit.arrival) is not None:
            told: Attributes = {
                "warmroute.prompt_tokens": arrival.prompt_tokens,
                "warmroute.approximate": arrival.approximate,
            }
            spans.append(self._child(trace, "tokenize", trace.read_s, arrival.now_s, told))
        for number, turn in enumerate(trace.turns):
            spans += self._of_turn(trace, turn, number, visit.end_s)
        return spans

    def _of_turn(
        self, trace: Trace, turn: Turn, number: int, end_s: float
    ) -> Iterator[ReadableSpan]:
        """The wait, the decision, the dispatch."""
        decided_s = end_s if turn.decided_s is None else turn.decided_s
        if turn.errand is None:
            why: Attributes = {"warmroute.code": turn.refused or "given_up"}
            waited = turn.refused is None or turn.refused in HELD_CODES
            name = "queue" if waited else "decide"
            yield self._child(trace, name, turn.asked_s, decided_s, why)
            return
        decision = _decoded(turn.errand.why)
        begun_s = turn.asked_s
        if decision.get("reason") == _HELD:
            yield self._child(trace, "queue", begun_s, decided_s, {})
            begun_s = decided_s
        about = _decision(decision, turn)
        yield self._child(trace, "decide", begun_s, decided_s, about)
        if turn.errand.carrier is not None:
            yield self._dispatch(trace, turn, number, end_s)

    def _dispatch(self, trace: Trace, turn: Turn, number: int, end_s: float) -> ReadableSpan:
        errand, outcome = turn.errand, turn.outcome
        assert errand is not None
        assert errand.carrier is not None
        upstream = errand.carrier.upstream
        about: Attributes = {
            "server.address": upstream.host,
            "server.port": upstream.port,
            "warmroute.worker": errand.worker_id,
            "warmroute.uncached_tokens": errand.uncached_tokens,
        }
        if number:
            about["http.request.resend_count"] = number
        if outcome is None:  # the client left, or a defect of ours ended it
            started_s, ended_s = turn.decided_s or turn.asked_s, end_s
        else:
            about |= _outcome(outcome)
            started_s, ended_s = outcome.started_s, turn.ended_s or end_s
        events = []
        if outcome is not None and outcome.first_s is not None:
            events.append(Event("first token", timestamp=self._ns(outcome.first_s)))
        return ReadableSpan(
            "dispatch",
            _context(trace, turn.span_id),
            _context(trace, trace.span_id),
            self._resource,
            about,
            events,
            kind=SpanKind.CLIENT,
            status=_status(outcome is not None and outcome.by_worker),
            start_time=self._ns(started_s),
            end_time=self._ns(max(ended_s, started_s)),
            instrumentation_scope=_SCOPE,
        )

    def _request(
        self, trace: Trace, line: AccessLine, began_s: float, end_s: float
    ) -> ReadableSpan:
        path = line.path[:_MAX_CHARS]
        told: dict[str, Any] = {
            "http.request.method": "POST",
            "url.path": path,
            "http.response.status_code": line.status,
            "gen_ai.request.model": line.model,
            "gen_ai.usage.input_tokens": line.prompt_tokens,
            "gen_ai.usage.output_tokens": line.output_tokens,
            "warmroute.request_id": line.id,
            "warmroute.stream": line.stream,
            "warmroute.finish": line.finish,
            "warmroute.blame": _blame(line),
            "warmroute.code": line.code,
            "warmroute.worker": line.worker,
            "warmroute.attempts": line.attempts,
            "warmroute.migrations": line.moved,
            "warmroute.expected_hit_tokens": line.expected_hit_tokens,
            "warmroute.cached_tokens": line.cached_tokens,
            "warmroute.turns_left_out": trace.more_turns or None,
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
            status=_status(_blame(line) in ("worker", "router")),
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


def _context(trace: Trace, span_id: int, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else None
    return SpanContext(trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED), state)


def _decoded(why: bytes) -> Mapping[str, Any]:
    """What `record.explanation.explanation` told; nothing where the desk told nothing."""
    return msgspec.json.decode(why, type=dict[str, Any]) if why else {}


def _decision(decision: Mapping[str, Any], turn: Turn) -> Attributes:
    told: dict[str, Any] = {
        f"warmroute.{name}": decision.get(name)
        for name in ("worker", "policy", "reason", "expected_hit_tokens", "prompt_tokens")
    }
    told |= {f"warmroute.{name}": decision.get(name) for name in ("held_s", "standing")}
    told["warmroute.cost_unit"] = decision.get("unit")
    best = decision.get("best", [])
    for prefix, one in zip(("warmroute.", "warmroute.runner_up."), best, strict=False):
        told |= {f"{prefix}{name}": one[name] for name in ("worker", "cost", "hit_tokens")}
        told |= {f"{prefix}term.{name}": value for name, value in one.get("terms", {}).items()}
    if len(best) > 1 and turn.outcome is not None:
        told |= _regret(decision, best[1], turn.outcome)
    return {name: _cut(value) for name, value in told.items() if value is not None}


def _regret(decision: Mapping[str, Any], other: Mapping[str, Any], outcome: Told) -> dict[str, Any]:
    """As `router.core.actions` has it."""
    told: dict[str, Any] = {}
    if outcome.cached_tokens is not None and not decision.get("approximate"):
        told["warmroute.regret_hit_tokens"] = max(other["hit_tokens"] - outcome.cached_tokens, 0)
    of_seconds = decision.get("unit") == SECONDS and other["cost"] is not None
    if of_seconds and outcome.first_s is not None:
        told["warmroute.regret_s"] = outcome.first_s - outcome.started_s - other["cost"]
    return told


def _outcome(outcome: Told) -> Attributes:
    told: dict[str, Any] = {
        "http.response.status_code": outcome.status,
        "warmroute.resumable": outcome.resumable or None,
        "warmroute.events": outcome.events or None,
        "warmroute.relay": outcome.relay,
        "error.type": outcome.error,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "warmroute.cached_tokens": outcome.cached_tokens,
    }
    return {name: value for name, value in told.items() if value is not None}


def _blame(line: AccessLine) -> str:
    """Whose fault the end was; "none": it went well."""
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
