"""The memory that 10,000 unique prompts leave behind in a router."""

from __future__ import annotations

from tests.bench.dataplane import cpu
from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import engines, run_load
from tests.bench.dataplane.routers import Subject

PROMPTS = 10_000
BYTES = 8_192
WARM = 500  # requests before the measurement, to fill what any requests fill


def growth(bench: Bench, subject: Subject) -> Figures:
    others = bench.cores.others
    with engines(others) as behind, subject.start(behind, bench.cores) as router:
        assert router.pid is not None
        warm = {"count": WARM, "bytes": BYTES}
        run_load(router.port, others, router.pid, behind.pid, **warm)
        before_kb = cpu.rss_kb(router.pid)
        unique = warm | {"count": PROMPTS, "unique": True}
        load = run_load(router.port, others, router.pid, behind.pid, **unique)
    figures = {
        FOREIGN: load.foreign,
        "mb": (load.rss_kb - before_kb) / 1024,
        "us": load.cpu_s * 1e6 / max(load.requests, 1),
    }
    if load.failed:
        figures[FAILED] = load.failed / (load.requests + load.failed)
    return figures


ROWS = (
    Row(
        "memory",
        [
            Figure("mb", "10,000 unique prompts of 8 KB, RSS growth MB", 12, 1),
            Figure("us", "the same, CPU us/request"),
        ],
        growth,
        without=("direct",),
    ),
)
