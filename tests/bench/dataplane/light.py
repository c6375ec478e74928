"""The latency that a router adds at a light load.

50 requests/s of 2 KB go alternately straight to an engine and through the router, so that noise on
the machine affects both. Figures are differences of percentiles over all slices of a round.
"""

from __future__ import annotations

import statistics

from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import engines, run_load
from tests.bench.dataplane.routers import Subject

RATE = 50
SLICES = 3


def added(bench: Bench, subject: Subject) -> Figures:
    others = bench.cores.others
    direct: list[float] = []
    through: list[float] = []
    foreign, failed = [], 0
    with engines(others) as behind, subject.start(behind, bench.cores) as router:
        for _ in range(SLICES):
            for port, pid, kept in (
                (behind.ports[0], None, direct),
                (router.port, router.pid, through),
            ):
                load = run_load(
                    port,
                    others,
                    pid,
                    behind.pid,
                    rate=RATE,
                    warmup_s=0.3,
                    seconds=bench.seconds,
                    dump=True,
                )
                kept += load.found["latency_us"]["all"]
                foreign.append(load.foreign)
                failed += load.failed
    figures = {
        FOREIGN: statistics.median(foreign),
        "p50": percentile(through, 0.5) - percentile(direct, 0.5),
        "p99": percentile(through, 0.99) - percentile(direct, 0.99),
    }
    if failed:
        figures[FAILED] = failed / (len(through) + failed)
    return figures


def percentile(values: list[float], share: float) -> float:
    """Return the percentile `share` of the values, counted as `load.cpp` does."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


ROWS = (
    Row(
        "light",
        [
            Figure("p50", "50 requests/s of 2 KB, added p50 us", "2 x HAProxy"),
            Figure("p99", "the same, added p99 us", "2 x HAProxy"),
        ],
        added,
        without=("direct",),
    ),
)
