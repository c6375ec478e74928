"""Chooses the requests that are traced: the caller decides, or else the trace's number, for a
configured share of requests.

W3C Trace Context, level 1 (w3.org/TR/trace-context), is parsed strictly, and written for the
workers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from policies.record import record
from router.http.messages import Request
from router.http.reply import Header

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1  # of the flags

_MAX_STATE_CHARS, _MAX_MEMBERS = 512, 32
_MAX_PARENT_BYTES = 512  # of a later version, which may say more
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_LOWER = (1 << 64) - 1


@record
class TraceContext:
    """The trace and the caller's span that a request's headers name."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0: of the caller's span
    sampled: bool
    state: str = ""  # the vendors' state, canonical; "": none


class Trace:
    """The trace of a request, and the trace headers that its workers get. Lifetime: the request's,
    and then until its record is written.
    """

    __slots__ = ("parent_id", "replaces", "sampled", "span_id", "state", "told_id", "trace_id")

    def __init__(
        self,
        trace_id: int,
        span_id: int,
        sampled: bool,
        parent: TraceContext | None = None,
        replaces: bool = True,
    ) -> None:
        """Make the trace of a request. `replaces` says whether these ids replace the client's own
        trace headers, if it sent any.
        """
        self.trace_id = trace_id
        self.span_id = span_id  # of the request
        self.told_id = span_id  # of the span that is the next worker's parent
        self.sampled = sampled  # spans are made of it
        self.parent_id = 0 if parent is None else parent.span_id  # 0: the trace begins here
        self.state = "" if parent is None else parent.state
        self.replaces = replaces

    def to_worker(self) -> tuple[Header, ...]:
        """Return the trace headers for the next attempt, in place of the client's own."""
        return headers_of(self.trace_id, self.told_id, self.sampled, self.state)


class Tracer:
    """Decides which requests are traced, and draws the numbers of traces and spans. Lifetime:
    process.
    """

    def __init__(self, below: int, draw: random.Random | None = None) -> None:
        """Trace the share of requests that `below` means (`below_of`), unless a caller decides
        itself.
        """
        self._below = below
        self._draw = draw or random.Random()

    def renew(self, below: int) -> None:
        """Trace another share of requests from now on."""
        self._below = below

    def begin(self, request: Request) -> Trace | None:
        """Return the trace of a new request; None if it is not traced, and its trace headers are
        passed on unchanged.

        A new trace's number is random. The trace is sampled if the lower half of the number is
        below the bound for the share, as in OpenTelemetry's `TraceIdRatioBased`, so that all
        programs decide alike for one number.
        """
        given = request.headers.get
        if given("traceparent") is None and given("tracestate") is None:
            return self._begun(False)
        parent = read_context(request.fields)
        if parent is None:
            return self._begun(True)
        if parent.sampled:
            return Trace(parent.trace_id, self.span_id(), True, parent)
        if parent.state or given("tracestate") is None:
            return None
        return Trace(parent.trace_id, parent.span_id, False)

    def span_id(self) -> int:
        """Return a random number for a new span."""
        return span_id_of(self._draw)

    def _begun(self, replaces: bool) -> Trace:
        """Return a new trace that begins at this router. Most requests take this path, and few are
        sampled.
        """
        number = self._draw.getrandbits(192)
        trace_id = number >> 64 or 1
        if trace_id & _LOWER < self._below:
            return Trace(trace_id, self.span_id(), True)
        return Trace(trace_id, number & _LOWER or 1, False, replaces=replaces)


def below_of(share: float) -> int:
    """Return the bound for a share from 0 to 1: a trace is sampled if the lower half of its number
    is below the bound.
    """
    return round(share * (1 << 64))


def span_id_of(draw: random.Random) -> int:
    """Return a random number for a span: 64 bits, not 0."""
    return draw.getrandbits(64) or 1


def read_context(headers: Iterable[Header]) -> TraceContext | None:
    """Return the trace context in a request's headers; None if `traceparent` is missing, repeated
    or malformed.

    A `tracestate` that is malformed or too long is ignored.
    """
    parents, states = [], []
    for name, value in headers:
        if len(name) == 11 and name.lower() == TRACEPARENT:
            parents.append(value)
        elif len(name) == 10 and name.lower() == TRACESTATE:
            states.append(value)
    if len(parents) != 1 or len(parents[0]) > _MAX_PARENT_BYTES:
        return None
    found = _PARENT.fullmatch(parents[0].strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    ids = int(trace_id, 16), int(span_id, 16)
    if not all(ids):
        return None
    return TraceContext(*ids, bool(int(flags, 16) & SAMPLED), _state(b",".join(states)))


def headers_of(trace_id: int, span_id: int, sampled: bool, state: str = "") -> tuple[Header, ...]:
    """Return the trace headers of a request to a worker; its parent is the router's span."""
    parent: Header = (TRACEPARENT, b"00-%032x-%016x-%02x" % (trace_id, span_id, sampled))
    return (parent, (TRACESTATE, state.encode())) if state else (parent,)


def _state(said: bytes) -> str:
    """Return a `tracestate` header in its normal form, or "" if it is malformed."""
    members = [member.strip(" \t") for member in said.decode("latin-1").split(",")]
    members = [member for member in members if member]
    joined = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    if len(joined) > _MAX_STATE_CHARS or len(members) > _MAX_MEMBERS or len(keys) < len(members):
        return ""
    return joined if all(map(_MEMBER.fullmatch, members)) else ""
