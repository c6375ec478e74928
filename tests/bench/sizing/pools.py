"""Measures CPU time of a request and of an idle router, and memory, by the pool's size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.dataplane import cpu
from tests.bench.dataplane.programs import Cores, engines, run_load
from tests.bench.dataplane.routers import ours
from tests.bench.sizing.table import Section, two_digits

WORKERS = (1, 8, 64, 256, 1_000)
IDLE_S = 6.0
SETTLED_S = 3.0  # until a router has asked new workers what they are
WARM_S = 3.0  # load before the measured one: a worker's first request also opens a connection
LEAST_S = 5.0  # several rounds of metrics, which an idle router's share is a mean of


@dataclass(frozen=True, slots=True)
class Pool:
    """The figures of a router with some number of workers and the default policy."""

    request_s: float  # CPU of a request of 2 KB of text, without what an idle router takes
    idle: float  # share of a core without a request
    rss_mb: float  # before the first request


def pool(workers: int, cores: Cores, seconds: float) -> Pool:
    """Measure a router with `workers` workers. Raises RuntimeError if a request failed."""
    with (
        engines(cores.others, ports=workers) as behind,
        ours("--limits-workers", "1024")(behind, cores) as router,
    ):
        assert router.pid is not None
        time.sleep(SETTLED_S)
        before_s, rss_mb = cpu.cpu_s(router.pid), cpu.rss_kb(router.pid) / 1024
        time.sleep(IDLE_S)
        idle = (cpu.cpu_s(router.pid) - before_s) / IDLE_S
        for load_s in (WARM_S, max(LEAST_S, seconds)):
            load = run_load(
                router.port, cores.others, router.pid, behind.pid, conns=16, seconds=load_s
            )
    if load.failed or not load.requests:
        raise RuntimeError(f"{load.failed} requests failed, {load.requests} were answered")
    busy_s = load.cpu_s - idle * float(load.found["seconds"])
    return Pool(busy_s / load.requests, idle, rss_mb)


def measure(cores: Cores, runs: int, seconds: float) -> dict[int, Pool]:
    """Return the median figures by number of workers."""
    found: dict[int, list[Pool]] = {workers: [] for workers in WORKERS}
    for _ in range(runs):
        for workers, pools in found.items():
            pools.append(pool(workers, cores, seconds))
    return {workers: _median(pools) for workers, pools in found.items()}


def _median(pools: list[Pool]) -> Pool:
    return Pool(
        statistics.median(pool.request_s for pool in pools),
        statistics.median(pool.idle for pool in pools),
        statistics.median(pool.rss_mb for pool in pools),
    )


def section(pools: dict[int, Pool]) -> Section:
    """Return the table of pools with a row for each number of workers."""
    return Section(
        "pools",
        "Workers",
        "The requests have 2 KB of text; the policy is `warmset`. An idle router reads the "
        "metrics of idle workers every two seconds.",
        ["workers", "CPU of a request, ms", "idle router, % of a core", "resident memory, MiB"],
        list(_rows(pools)),
    )


def _rows(pools: dict[int, Pool]) -> Iterator[list[str]]:
    for workers, one in pools.items():
        cells = (one.request_s * 1e3, one.idle * 100, one.rss_mb)
        yield [f"{workers:,}", *map(two_digits, cells)]
