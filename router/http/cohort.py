"""Requests of one turn of the event loop go through each stage together.

Hundreds of functions take part in a request, more than a core's first caches hold: one request
after another, each from its first byte to its worker, finds none of them warm. Stage by stage the
second request finds what the first one fetched (cohort scheduling: Larus and Parkes, "Using Cohort
Scheduling to Enhance Server Performance", USENIX 2002). A request that is alone pays one more turn
of the loop.
"""

from __future__ import annotations

from collections.abc import Generator
from types import coroutine


@coroutine
def cohort() -> Generator[None]:
    """End a stage: wait until the others of this turn have come as far."""
    yield
