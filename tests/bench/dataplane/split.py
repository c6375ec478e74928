"""The router's CPU cost of a disaggregated request, compared with one that a single worker answers.

The same 2 KB requests go in turn to a pool of two plain workers and to a prefill and a decode
worker. A client that makes both calls itself waits twice for an engine. Other routers send both
engines the same body at once, as SGLang wants it; ours makes one call after the other, as vLLM
does.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from tests.bench.dataplane.light import RATE, SLICES, percentile
from tests.bench.dataplane.measured import FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import engines, run_load
from tests.bench.dataplane.routers import Subject


def cost(bench: Bench, subject: Subject) -> Figures:
    """Measure the CPU time of a request in a closed loop, and its latency at a light load."""
    others, foreign = bench.cores.others, list[float]()
    cpu_us: list[list[float]] = [[], []]
    latency_us: list[list[float]] = [[], [], []]
    with (
        engines(others, ports=2) as behind,
        subject.start(behind, bench.cores) as plain_one,
        subject.start(replace(behind, pair=True), bench.cores) as split_one,
    ):
        both = plain_one, split_one
        for _ in range(SLICES):
            for router, kept in zip(both, cpu_us, strict=True):
                load = run_load(router.port, others, router.pid, behind.pid, seconds=bench.seconds)
                kept.append(load.cpu_s * 1e6 / load.requests)
                foreign.append(load.foreign)
            ways = [(behind.ports[0], None), *((one.port, one.pid) for one in both)]
            for (port, pid), kept in zip(ways, latency_us, strict=True):
                light = {"rate": RATE, "warmup_s": 0.3, "seconds": bench.seconds, "dump": True}
                load = run_load(port, others, pid, behind.pid, **light)
                kept += load.found["latency_us"]["all"]
                foreign.append(load.foreign)
    plain, split = map(statistics.median, cpu_us)
    direct, through, twice = (percentile(kept, 0.5) for kept in latency_us)
    return {
        FOREIGN: statistics.median(foreign),
        "us": split,
        "cpu": split / plain,
        "added": (twice - 2 * direct) / (through - direct),
    }


ROWS = (
    Row(
        "split",
        [
            Figure("us", "2 KB text in two legs, CPU us/request"),
            Figure("cpu", "the same over a plain request's CPU", 2.2, 2),
            Figure("added", "50 requests/s: added p50 over that of a plain request", 2.2, 2),
        ],
        cost,
        without=("direct", "HAProxy", "nginx", "vllm-router"),
    ),
)
