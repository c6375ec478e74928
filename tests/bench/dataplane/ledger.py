"""Reads from a router's metrics what its ledger still charges to workers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tests.bench.dataplane.programs import get

SETTLE_S = 5.0
LEDGER = (
    "warmroute_inflight_requests",
    "warmroute_held_requests",
    "warmroute_worker_requests",
    "warmroute_worker_queued_prefill_tokens",
    "warmroute_worker_context_tokens",
)


def charged(admin: str) -> float:
    """Wait until the ledger charges nothing or the settling time is over; return the sum of its
    charges.
    """

    def left() -> float:
        page = get(f"{admin}/metrics")
        return sum(total(page, name) for name in LEDGER)

    return until_zero(left)


def until_zero(left: Callable[[], float], within_s: float = SETTLE_S) -> float:
    """Poll the function until it returns zero or `within_s` seconds are over; return its last
    value.
    """
    deadline_s = time.monotonic() + within_s
    while (found := left()) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # between two readings of another program
    return found


def total(page: str, name: str) -> float:
    """Return the sum of all samples of the metric `name` on a metrics page."""
    samples = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, samples))
