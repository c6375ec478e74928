"""What a router still has charged, read from its metrics."""

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
    """What the ledger still has once it has had time to come to nothing."""

    def left() -> float:
        page = get(f"{admin}/metrics")
        return sum(total(page, name) for name in LEDGER)

    return until_zero(left)


def until_zero(left: Callable[[], float], within_s: float = SETTLE_S) -> float:
    """What is left once it has had time to come to nothing."""
    deadline_s = time.monotonic() + within_s
    while (found := left()) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # between looks at another program
    return found


def total(page: str, name: str) -> float:
    """The sum of a metric's samples."""
    samples = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, samples))
