"""CPU time of two routers that share state through Redis, compared with two that do not.

Both pairs run all the time and get the load in turn, so that noise on the machine affects both. CPU
time is that of both routers of a pair with all their threads, without Redis' own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.dataplane.ledger import total, until_zero
from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Figures, Row
from tests.bench.dataplane.programs import Engines, Load, engines, get, run_load
from tests.bench.dataplane.routers import Running, Subject, ours
from tests.live.redis_server import redis_server

RATE = 1_000  # requests/s, of both routers together
SLICES = 7  # of each pair, in a round
# The requests that a slice must answer to count: with fewer, the link's fixed cost weighs too much.
LEAST = 0.9 * RATE
ENGINES = 8
POLICY = "warmset"  # the default policy; it follows sessions, also those of peers
PEERS_METRIC = "warmroute_replicas_peers"

Pair = Sequence[Running]


@contextmanager
def pair(bench: Bench, behind: Engines, subject: Subject, state: str | None) -> Iterator[Pair]:
    """Run two routers in front of the same engines; they share state through Redis if `state` is
    given.
    """
    with ExitStack() as stack:
        routers = []
        for name in ("a", "b"):
            sharing = () if state is None else ("--state", state, "--replicas-name", name)
            log = f"warmroute-{'alone' if state is None else 'shares'}-{name}"
            start = ours(*subject.flags, *sharing, log=log)
            routers.append(stack.enter_context(start(behind, bench.cores)))
        if state is not None:
            until_zero(lambda: sum(1 - total(page(one), PEERS_METRIC) for one in routers))
        yield routers


def page(router: Running) -> str:
    """Return the router's metrics page."""
    return get(f"{router.admin}/metrics")


def at_rate(
    bench: Bench, behind: Engines, routers: Pair, bytes_: int, ids: bool, rate: int = RATE
) -> Load:
    """Run the load at a rate through both routers in turn: 512 prompts, a quarter of each
    shared.
    """
    return run_load(
        [one.port for one in routers],
        bench.cores.others,
        [one.pid for one in routers if one.pid is not None],
        behind.pid,
        rate=rate,
        conns=256,
        distinct=512,
        bytes=bytes_,
        ids=ids,
        warmup_s=0.5,
        seconds=bench.seconds,
    )


def shared(bytes_: int, ids: bool) -> Callable[[Bench, Subject], Figures]:
    """Return a function that measures a request's CPU time with and without shared state."""

    def measure(bench: Bench, subject: Subject) -> Figures:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            state = stack.enter_context(redis_server(folder / "redis")).url
            behind = stack.enter_context(engines(bench.cores.others, ports=ENGINES))
            pairs = [
                stack.enter_context(pair(bench, behind, subject, one)) for one in (None, state)
            ]
            loads: list[list[Load]] = [[], []]
            for _ in range(SLICES):
                for routers, measured in zip(pairs, loads, strict=True):
                    measured.append(at_rate(bench, behind, routers, bytes_, ids))
            left = until_zero(lambda: sum(map(_charged, pairs[1])))
            missed = until_zero(lambda: sum(map(unheard, pairs[1])))
        return {**_figures(*loads), "left": left + missed}

    return measure


def _figures(alone: Sequence[Load], sharing: Sequence[Load]) -> dict[str, float]:
    """Return the differences between the paired measurements. Raises RuntimeError if fewer than two
    slices count.
    """
    all_loads = [*alone, *sharing]
    failed = sum(load.failed for load in all_loads)
    both = zip(alone, sharing, strict=True)
    times = [(_us(one), _us(other)) for one, other in both if min(_rps(one), _rps(other)) >= LEAST]
    if not times:
        raise RuntimeError(f"others left too little: at most {max(map(_rps, all_loads)):.0f}/s")
    return {
        FOREIGN: statistics.median(load.foreign for load in all_loads),
        FAILED: failed / max(sum(load.requests for load in all_loads) + failed, 1),
        "without": statistics.median(without for without, _ in times),
        "with": statistics.median(with_it for _, with_it in times),
        "more": statistics.median((with_it / without - 1) * 100 for without, with_it in times),
        "slices": len(times),
    }


def _rps(load: Load) -> float:
    return load.requests / float(load.found["seconds"])


def _us(load: Load) -> float:
    return load.cpu_s * 1e6 / max(load.requests, 1)


def _charged(router: Running) -> float:
    return total(page(router), "warmroute_worker_requests")


def unheard(router: Running) -> float:
    """Return how many requests of the peer router are still charged, plus the number of lost
    messages.
    """
    text = page(router)
    return total(text, "warmroute_replicas_peer_requests") + total(
        text, "warmroute_replicas_message_errors_total"
    )


def _row(name: str, shown: str, bytes_: int, ids: bool) -> Row:
    figures = [
        Figure("without", f"two routers, 1,000 requests/s of {shown} in all, CPU us/request"),
        Figure("with", "the same, sharing state"),
        Figure("more", "what sharing adds, %", 10, 1),
        Figure("slices", f"slices of both that count: {LEAST:g} requests/s were answered"),
        Figure("left", "left in the ledgers, or missed", 0),
    ]
    return Row(name, figures, shared(bytes_, ids), ours_only=True)


ROWS = (
    _row("replicas", "2 KB of text", 2_048, ids=False),
    _row("replicas-ids", "2,048 token ids", 2_048 * 6, ids=True),
)
