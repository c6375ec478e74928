"""CPU time of a request that is answered in one piece: text and token ids, short and long."""

from __future__ import annotations

from collections.abc import Callable

from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import engines, run_load
from tests.bench.dataplane.routers import Subject


def cpu_per_request(bytes_: int, **flags: object) -> Callable[[Bench, Subject], Figures]:
    """Return a function that measures the CPU time of a request, with 64 closed-loop connections
    and 64 prompts, a quarter of which is shared.

    `flags` change the load generator's defaults.
    """

    def measure(bench: Bench, subject: Subject) -> Figures:
        others = bench.cores.others
        with engines(others) as behind, subject.start(behind, bench.cores) as router:
            load = run_load(
                router.port,
                others,
                router.pid,
                behind.pid,
                bytes=bytes_,
                **flags,
                seconds=bench.seconds,
            )
        figures = {FOREIGN: load.foreign}
        if load.failed:
            figures[FAILED] = load.failed / (load.requests + load.failed)
        if load.requests > load.failed:
            figures["us"] = load.cpu_s * 1e6 / load.requests
            figures["rps"] = load.requests / load.found["seconds"]
        return figures

    return measure


def row(name: str, shown: str, bar: float | None, bytes_: int, **flags: object) -> Row:
    figure = Figure("us", f"{shown}, CPU us/request", bar)
    return Row(name, [figure], cpu_per_request(bytes_, **flags), without=("direct",))


ROWS = (
    row("2k", "2 KB text", 110, 2_048),
    row("2k-unique", "2 KB text, no prompt twice", None, 2_048, unique=True),
    row("2k-session", "2 KB text, 64 sessions by id", None, 2_048, session=True),
    row("64k", "64 KB text", 250, 65_536),
    row("64k-unique", "64 KB text, no prompt twice", None, 65_536, unique=True),
    row("ids-2k", "2 KB of token ids", None, 2_048, ids=True),
    row("ids-64k", "64 KB of token ids", None, 65_536, ids=True),
)
