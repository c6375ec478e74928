"""Reads the counters of workers and router from their `/metrics`, once or over time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import numpy.typing as npt

from simulator.replay.result import Samples

BODY_BYTES = 4 << 20

Floats = npt.NDArray[np.float64]


class ScrapeError(RuntimeError):
    """Raised if an endpoint did not give metrics; the message says which endpoint, and what it
    answered.
    """


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """One worker's counters at one moment; a counter that a worker does not give is 0."""

    hit_tokens: float
    query_tokens: float
    steps: float
    overrun_steps: float
    busy_s: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of all workers at one moment of a run."""

    at_s: float  # wall clock, seconds from the start of the run
    workers: tuple[WorkerCounters, ...]


def pool_samples(samples: Sequence[Sample], speed: float) -> Samples:
    """Return the samples of the pool over model time, in the form that a replay has, from the first
    one on.

    Workers count a step when it ends, and a step can be longer than the time between two samples:
    work that does not fit into an interval is assigned to the intervals before it.
    """
    times = np.array([sample.at_s for sample in samples])

    def column(name: str) -> Floats:
        rows = [[getattr(counters, name) for counters in sample.workers] for sample in samples]
        return np.array(rows, np.float64).reshape(len(samples), -1 if samples else 0)

    grown, room = np.diff(column("busy_s"), axis=0), np.diff(times)
    for row in range(len(room) - 1, 0, -1):
        held = np.minimum(grown[row], room[row])
        grown[row - 1] += grown[row] - held
        grown[row] = held
    asked, found = column("query_tokens"), column("hit_tokens")
    return Samples(
        (times[1:] * speed * 1e9).astype(np.int64),
        np.clip(grown / room[:, None], 0.0, 1.0),
        column("running")[1:].astype(np.int32),
        column("waiting")[1:].astype(np.int32),
        np.zeros((max(len(samples) - 1, 0), asked.shape[1]), np.int32),
        (asked - asked[:1])[1:].astype(np.int64),
        (found - found[:1])[1:].astype(np.int64),
    )


def metric_totals(text: str) -> dict[str, float]:
    """Return the sum over all labels of every series on a Prometheus text page. Raises ValueError
    for wrong lines.
    """
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        # Labels may hold blanks; the value follows the last bracket. Timestamps are not sent.
        value = float(line.rpartition("}")[2].split()[-1])
        totals[name] = totals.get(name, 0.0) + value
    return totals


def worker_counters(totals: dict[str, float]) -> WorkerCounters:
    """Return the counters that this project reads, from series with vLLM's names and with those of
    this project's timed worker.
    """
    return WorkerCounters(
        hit_tokens=totals.get("vllm:prefix_cache_hits_total", 0.0),
        query_tokens=totals.get("vllm:prefix_cache_queries_total", 0.0),
        steps=totals.get("warmroute_engine_steps_total", 0.0),
        overrun_steps=totals.get("warmroute_engine_overrun_steps_total", 0.0),
        busy_s=totals.get("warmroute_engine_busy_seconds_total", 0.0),
        running=totals.get("vllm:num_requests_running", 0.0),
        waiting=totals.get("vllm:num_requests_waiting", 0.0),
    )


async def fetch_text(session: aiohttp.ClientSession, url: str) -> str:
    """Return the text of `url`/metrics. Raises `ScrapeError` if the endpoint does not answer."""
    try:
        async with session.get(f"{url}/metrics") as reply:
            body = await reply.content.read(BODY_BYTES)
            if reply.status != 200:
                raise ScrapeError(f"{url}/metrics: HTTP {reply.status}")
        return body.decode()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ScrapeError(f"{url}/metrics: {error or type(error).__name__}") from error


async def fetch_totals(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the `metric_totals` of `url`/metrics. Raises `ScrapeError` if the endpoint does not
    answer.
    """
    text = await fetch_text(session, url)
    try:
        return metric_totals(text)
    except ValueError as error:
        raise ScrapeError(f"{url}/metrics: {error}") from error


async def fetch_workers(
    session: aiohttp.ClientSession, urls: Sequence[str]
) -> tuple[WorkerCounters, ...]:
    """Return the counters of the workers at `urls`, in that order. Raises `ScrapeError` if one does
    not answer.
    """
    pages = await asyncio.gather(*(fetch_totals(session, url) for url in urls))
    return tuple(worker_counters(page) for page in pages)


async def sample_forever(
    session: aiohttp.ClientSession, urls: Sequence[str], interval_s: float, into: list[Sample]
) -> None:
    """Append a sample to `into` every `interval_s` until cancelled. Raises `ScrapeError`."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    while True:
        at_s = clock() - started_s
        into.append(Sample(at_s, await fetch_workers(session, urls)))
        await asyncio.sleep(max(0.0, started_s + len(into) * interval_s - clock()))
