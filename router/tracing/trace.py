"""A traced request: its moments, noted as they pass; a thread makes spans of them (`spans.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Union

from policies.contract import record
from policies.facts import Arrival
from router.core.actions import Reject
from router.request.errors import ClientError, WorkerError
from router.tracing.context import TraceContext, headers_of
from router.upstream.reply import Header, Outcome

if TYPE_CHECKING:
    from router.request.desk import Errand, LocalCase

Traced = Union["Trace", "Passed"]  # what a request is to the tracer that began it

_MAX_TURNS = 32  # of a request that migrates on and on: later ones are counted only


class Turn:
    """A question to the desk and what followed it. Lifetime: as its trace."""

    __slots__ = (
        "asked_s", "decided_s", "ended_s", "errand", "outcome", "refused", "span_id",
    )  # fmt: skip

    def __init__(self, asked_s: float, span_id: int) -> None:
        self.asked_s = asked_s
        self.span_id = span_id  # of the dispatch, as its worker is told
        self.decided_s: float | None = None  # None: the request was given up before
        self.errand: Errand | None = None
        self.refused: str | None = None  # the code of a refusal
        self.outcome: Told | None = None
        self.ended_s: float | None = None


@record
class Told:
    """An outcome without its error, which would hold on to half the handler."""

    started_s: float
    first_s: float | None  # of an answer, its first token
    status: int | None
    error: str | None  # the worker's kind, or the client's code
    by_worker: bool  # the error is its fault
    resumable: bool
    events: int
    relay: str
    output_tokens: int | None
    cached_tokens: int | None


def told_of(outcome: Outcome) -> Told:
    """What of an outcome a span has."""
    error, usage = outcome.error, outcome.usage
    kind: str | None = error.kind if isinstance(error, WorkerError) else None
    if isinstance(error, ClientError):
        kind = error.code or "client_left"
    return Told(
        outcome.started_s,
        (outcome.first_token_s or outcome.first_byte_s) if outcome.answers else None,
        outcome.status,
        kind,
        isinstance(error, WorkerError),
        outcome.resumable,
        outcome.events,
        "python" if outcome.why_python else "native",
        None if usage is None else usage.completion_tokens,
        None if usage is None else usage.cached_tokens,
    )


class Trace:
    """Lifetime: request, and then until it is exported. Moments are of the router's clock."""

    replaces = True  # trace headers of the client's
    __slots__ = (
        "_clock", "_draw", "more_turns", "parent_id", "read_s", "span_id", "state", "trace_id",
        "turns",
    )  # fmt: skip

    def __init__(
        self,
        trace_id: int,
        parent: TraceContext | None,
        clock: Callable[[], float],
        draw: random.Random,
    ) -> None:
        """`draw` gives ids of spans."""
        self._clock = clock
        self._draw = draw
        self.trace_id = trace_id
        self.parent_id = 0 if parent is None else parent.span_id  # 0: the trace begins here
        self.state = "" if parent is None else parent.state
        self.span_id = span_id_of(draw)
        self.read_s: float | None = None  # the whole body was there
        self.turns: list[Turn] = []
        self.more_turns = 0

    def read(self) -> None:
        """The body is there; tokenization begins."""
        self.read_s = self._clock()

    def to_worker(self) -> tuple[Header, ...]:
        """What the next dispatch carries, in place of the client's own trace headers."""
        span_id = self.turns[-1].span_id if self.turns else self.span_id
        return headers_of(self.trace_id, span_id, True, self.state)

    def asks(self) -> None:
        """The desk is asked for a worker."""
        if len(self.turns) == _MAX_TURNS:
            self.more_turns += 1
            self.turns.pop()
        self.turns.append(Turn(self._clock(), span_id_of(self._draw)))

    def decided(self, errand: Errand | Reject) -> None:
        """The desk's answer."""
        turn = self.turns[-1]
        turn.decided_s = self._clock()
        if isinstance(errand, Reject):
            turn.refused = errand.code
        else:
            turn.errand = errand

    def ended(self, outcome: Outcome) -> None:
        """A dispatch is over."""
        turn = self.turns[-1]
        turn.ended_s = self._clock()
        turn.outcome = told_of(outcome)


class Passed:
    """A request that is not sampled and whose workers are to know that. Lifetime: request."""

    __slots__ = ("_headers", "replaces", "trace_id")

    def __init__(self, trace_id: int, headers: tuple[Header, ...], replaces: bool) -> None:
        """`headers`: what workers are told; `replaces`: the client has said something else."""
        self.trace_id = trace_id
        self.replaces = replaces
        self._headers = headers

    def read(self) -> None:
        """See `Trace`."""

    def to_worker(self) -> tuple[Header, ...]:
        """See `Trace`."""
        return self._headers


class TracedCase:
    """A case whose steps are noted in a trace. Lifetime: request."""

    __slots__ = ("_case", "_trace", "first_token", "progress", "request_id", "why_refused")

    def __init__(self, case: LocalCase, trace: Trace) -> None:
        self._case, self._trace = case, trace
        self.request_id = case.request_id
        self.first_token, self.progress = case.first_token, case.progress
        self.why_refused = case.why_refused

    def __enter__(self) -> TracedCase:
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
        self._trace.asks()
        self._case.arrive()

    async def next_errand(self) -> Errand | Reject:
        """See `LocalCase`."""
        errand = await self._case.next_errand()
        self._trace.decided(errand)
        return errand

    def gone(self) -> None:
        """See `LocalCase`."""
        self._trace.asks()
        self._case.gone()

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Arrival | None = None) -> bool:
        """See `LocalCase`."""
        self._trace.ended(outcome)
        follows = self._case.ended(outcome, own_tokens, rest)
        if follows:
            self._trace.asks()
        return follows

    def refused(self, reject: Reject, status: int) -> None:
        """See `LocalCase`."""
        self._case.refused(reject, status)


def span_id_of(draw: random.Random) -> int:
    """A number for a span: 64 bits, not 0."""
    return draw.getrandbits(64) or 1
