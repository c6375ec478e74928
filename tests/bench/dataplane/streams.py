"""CPU time of streamed answers: of an event, of a thousand streams, and while Python stalls.

Events come 50 ms apart. Streams begin spread over their length, so that their phases differ: a
router that is woken for many events at once would look cheaper than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.bench.dataplane import cpu
from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import Load, engines, run_load
from tests.bench.dataplane.routers import Subject, ours

GAP_US = 50_000
EVENTS = 200  # a stream: 10 s
STREAM_S = EVENTS * GAP_US / 1e6
STALLED = "tests.bench.dataplane.stalled"


def streams(bench: Bench, subject: Subject, count: int) -> tuple[Load, int]:
    """Run `count` streams at a time; return the load's result and the router's memory before it, in
    KB.
    """
    others = bench.cores.others
    with (
        engines(others, delay_us=GAP_US) as behind,
        subject.start(behind, bench.cores) as router,
    ):
        before_kb = 0 if router.pid is None else cpu.rss_kb(router.pid)
        load = run_load(
            router.port,
            others,
            router.pid,
            behind.pid,
            stream=True,
            events=EVENTS,
            conns=count,
            ramp_s=STREAM_S,
            warmup_s=STREAM_S + 0.5,
            seconds=bench.seconds,
        )
    return load, before_kb


def figures_of(load: Load, before_kb: int, count: int) -> dict[str, float]:
    delay: Mapping[str, float] = load.found["event_us"]
    figures = {FOREIGN: load.foreign, "p50": delay["p50"] / 1e3, "p99": delay["p99"] / 1e3}
    if load.failed:
        figures[FAILED] = load.failed / (load.requests + load.failed)
    if load.cpu_s > 0:
        figures["us"] = load.cpu_s * 1e6 / load.events
        figures["kb"] = (load.rss_kb - before_kb) / count
    return figures


def paced(count: int) -> Callable[[Bench, Subject], Figures]:
    def measure(bench: Bench, subject: Subject) -> Figures:
        return figures_of(*streams(bench, subject, count), count)

    return measure


def stalled(bench: Bench, subject: Subject) -> Figures:
    """Measure streams while the router's event loop stops for 20 ms in every 200."""
    held_up = Subject(subject.name, ours(*subject.flags, module=STALLED))
    return figures_of(*streams(bench, held_up, 100), 100)


ROWS = (
    Row(
        "event",
        [
            Figure("us", "event of 200 bytes, 256 streams at 20/s, CPU us", 22, 1),
            Figure("p99", "the same, delay p99 ms", None, 2),
        ],
        paced(256),
    ),
    Row(
        "streams",
        [
            Figure("p50", "1,000 streams at 20 events/s, delay p50 ms", None, 2),
            Figure("p99", "the same, delay p99 ms", "2 x HAProxy", 2),
            Figure("us", "the same, CPU us/event", None, 1),
            Figure("kb", "the same, KB a stream", 60),
        ],
        paced(1_000),
    ),
    Row(
        "stall",
        [
            Figure("p50", "20 ms stall every 200 ms, event delay p50 ms", None, 2),
            Figure("p99", "the same, p99 ms", 5, 2),
        ],
        stalled,
        ours_only=True,
    ),
)
