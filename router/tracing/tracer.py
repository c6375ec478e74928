"""Which requests are traced: as their caller decided, else a share, by the trace's number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from router.http.client_request import ClientRequest
from router.tracing.context import headers_of, read_context
from router.tracing.trace import Passed, Trace, Traced

if TYPE_CHECKING:
    from router.http.visits import Visit

_LOWER = (1 << 64) - 1


class Sink(Protocol):
    """Where traces go that are over."""

    def put(self, visit: Visit) -> None:
        """A traced visit is over. Never waits."""
        ...


class Tracer:
    """Lifetime: process."""

    def __init__(
        self,
        sink: Sink,
        below: Callable[[], int],
        clock: Callable[[], float],
        draw: random.Random | None = None,
    ) -> None:
        """`below`: of those whose caller says nothing, which are sampled (`below_of`)."""
        self._sink = sink
        self._below = below
        self._clock = clock
        self._draw = draw or random.Random()

    def end(self, visit: Visit) -> None:
        """A traced visit is over."""
        self._sink.put(visit)

    def begin(self, request: ClientRequest) -> Traced | None:
        """A request comes. None: it is not traced, and its headers go on as they are.

        A new trace's number is random; sampled are those whose lower half is below the share, as
        with OpenTelemetry's `TraceIdRatioBased`, so that all who see a number decide alike.
        """
        given = request.headers.get
        if given("traceparent") is not None or given("tracestate") is not None:
            parent = read_context(request.raw_headers)
            if parent is not None and parent.sampled:
                return Trace(parent.trace_id, parent, self._clock, self._draw)
            if parent is not None:
                ids = parent.trace_id, parent.span_id
                right = bool(parent.state) or given("tracestate") is None
                return None if right else Passed(ids[0], headers_of(*ids, False), True)
            return self._begun(True)
        return self._begun(False)

    def _begun(self, replaces: bool) -> Traced:
        """A trace that begins here: most requests come this way, and few are sampled."""
        number = self._draw.getrandbits(192)
        trace_id = number >> 64 or 1
        if trace_id & _LOWER < self._below():
            return Trace(trace_id, None, self._clock, self._draw)
        return Passed(trace_id, headers_of(trace_id, number & _LOWER or 1, False), replaces)


def below_of(share: float) -> int:
    """Traces whose number's lower half is below this are sampled, where a share in [0, 1] is."""
    return round(share * (1 << 64))
