"""Two processes beside one, at one rate: cost, balance, hits, and that nothing is left charged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from router.config.schema import Config
from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import engines, get, run_load
from tests.bench.dataplane.routers import Subject, ours

RATE = 800  # requests/s
SETTLE_S = 5.0
LEDGER = (
    "warmroute_inflight_requests",
    "warmroute_held_requests",
    "warmroute_worker_requests",
    "warmroute_worker_queued_prefill_tokens",
    "warmroute_worker_context_tokens",
)


def one_and_two(bench: Bench, subject: Subject) -> Figures:
    if "processes" not in Config.__struct_fields__:
        raise RuntimeError("it has no key `processes`")
    figures: dict[str, float] = {}
    for count in (1, 2):
        started = ours("--processes", str(count), *subject.flags)
        found = at_rate(bench, Subject(subject.name, started))
        figures |= {f"{name}{count}": value for name, value in found.items() if name != FOREIGN}
        figures[FOREIGN] = max(figures.get(FOREIGN, 0.0), found[FOREIGN])
    figures["ratio"] = figures["us2"] / figures["us1"]
    figures["left"] = figures["left1"] + figures["left2"]
    return figures


def at_rate(bench: Bench, subject: Subject) -> dict[str, float]:
    """512 prompts, a quarter shared, in turn."""
    others = bench.cores.others
    with engines(others) as behind, subject.start(behind, bench.cores) as router:
        load = run_load(
            router.port,
            others,
            router.pid,
            behind.pid,
            rate=RATE,
            conns=256,
            distinct=512,
            seconds=bench.seconds,
        )
        sent = [engine["requests"] for engine in behind.counts()]
        left = charged(router.admin)
        page = get(f"{router.admin}/metrics")
    hit = total(page, "warmroute_expected_hit_tokens_total")
    return {
        FOREIGN: load.foreign,
        FAILED: load.failed / max(load.requests + load.failed, 1),
        "us": load.cpu_s * 1e6 / max(load.requests, 1),
        "most": max(sent) * len(sent) / sum(sent),
        "hit": 100 * hit / max(total(page, "warmroute_prompt_tokens_total"), 1),
        "left": left,
    }


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


ROWS = (
    Row(
        "processes",
        [
            Figure("us1", "800 requests/s of 2 KB, one process, CPU us/request"),
            Figure("us2", "the same, two processes"),
            Figure("ratio", "two / one", 1.1, 2),
            Figure("most1", "most loaded engine / mean, one process", None, 3),
            Figure("most2", "the same, two processes", None, 3),
            Figure("hit1", "expected hits, one process, %", None, 1),
            Figure("hit2", "the same, two processes", "+- 1", 1),
            Figure("left", "left in the ledgers afterwards", 0),
        ],
        one_and_two,
        ours_only=True,
    ),
)
