"""The load generator: it sends a workload in open loop at recorded times, or in closed loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter

from simulator.live.client import Sender, Target
from simulator.live.outcome import Outcome
from simulator.traces.job import Job
from simulator.traces.spec import WorkloadSpec
from simulator.traces.timing import NS
from simulator.workloads.open import open_jobs, sessions

MAX_REQUESTS = 1_000_000


class WorkloadError(ValueError):
    """Raised for an invalid workload; the message says which size is wrong and which sizes are
    allowed.
    """


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a measurement in order of arrival. Lifetime: process; several measurements
    may use it.

    If `ends_s` is given, the workload is a closed loop: each turn of a session is sent after the
    previous answer and the recorded pause, and no turn is sent at `ends_s` seconds or later.
    """

    name: str
    jobs: tuple[Job, ...]
    block_tokens: int  # prompt tokens an id of `jobs` stands for
    origin: str  # where it comes from, one line for the report
    ends_s: float | None = None  # None: an open loop, every job at its own time

    def __post_init__(self) -> None:
        if not self.jobs:
            raise WorkloadError(f"workload {self.name}: has no requests")
        if len(self.jobs) > MAX_REQUESTS:
            raise WorkloadError(f"workload {self.name}: more than {MAX_REQUESTS} requests")
        if self.ends_s is not None and not 0 < self.ends_s < math.inf:
            raise WorkloadError(f"workload {self.name}: ends_s {self.ends_s:g}: must be above 0")

    @property
    def span_s(self) -> float:
        """Seconds from the start to the last arrival, or to the end of a closed loop."""
        return self.jobs[-1].at_ns / NS if self.ends_s is None else self.ends_s


def opened(
    spec: WorkloadSpec, name: str, origin: str, seed: int = 0, ends_s: float | None = None
) -> Workload:
    """Return the requests of a trace or generator, held in memory; with `ends_s`, a closed loop.

    Raises `TraceError` for a source that cannot be read, `WorkloadError` for a source of too many
    requests.
    """
    stream = open_jobs(spec, seed)
    jobs = tuple(islice(stream.jobs, MAX_REQUESTS + 1))
    return Workload(name, jobs, stream.block_tokens, origin, ends_s)


OnOutcome = Callable[[Outcome], None]


async def run_load(
    workload: Workload,
    target: Target,
    on_outcome: OnOutcome,
    speed: float = 1.0,
    concurrency: int | None = None,
) -> None:
    """Send the jobs of `workload`, and call `on_outcome` once for each in the order in which they
    end.

    Open loop (neither `concurrency` nor `workload.ends_s`): a job is sent at its time divided by
    `speed`, whatever happened to earlier jobs. If the generator, or its limit
    `target.max_in_flight`, sends a job late, its times still count from the planned time, and the
    outcome says how late it was. Closed loop of sessions (`workload.ends_s`): see `_sessions`.
    Closed loop of requests: `concurrency` requests are under way until none is left, and the times
    of the jobs are ignored. Cancelling this function closes every connection; earlier outcomes stay
    valid.
    """
    if speed <= 0:
        raise ValueError(f"speed {speed:g}: must be above 0")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: must be 1 or more")
    async with target.open_session() as session:
        # The loop's own clock is no finer than a millisecond under uvloop, as long as some TTFTs.
        sender = Sender(target, session, perf_counter, started_s=perf_counter())
        if concurrency is None and workload.ends_s is not None:
            await _sessions(workload, sender, on_outcome, speed, workload.ends_s)
        elif concurrency is None:
            await _open_loop(workload, sender, on_outcome, speed)
        else:
            await _closed_loop(workload, sender, on_outcome, concurrency)


async def _open_loop(
    workload: Workload, sender: Sender, on_outcome: OnOutcome, speed: float
) -> None:
    slots = asyncio.Semaphore(sender.target.max_in_flight)

    async def one(job: Job, serial: int, body: bytes, due_s: float) -> None:
        try:
            on_outcome(await sender.send(job, serial, body, due_s))
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for serial, job in enumerate(workload.jobs):
            # Made before the wait, so that making it does not make the request late.
            body = sender.target.body(job, serial)
            due_s = sender.started_s + job.at_ns / NS / speed
            await _sleep_until(due_s, sender.clock)
            await slots.acquire()
            group.create_task(one(job, serial, body, due_s))


async def _sessions(
    workload: Workload, sender: Sender, on_outcome: OnOutcome, speed: float, ends_s: float
) -> None:
    """Send the turns of each session one after the other, as a closed loop.

    A session begins at the time of its first job. A later turn comes `think_ns` after the last byte
    of the previous answer, or after its refusal; if no pause was recorded, the time between the two
    recorded arrivals takes its place. A turn that would come at `ends_s` or later is not sent, so a
    session with slow answers has fewer turns.
    """
    slots = asyncio.Semaphore(sender.target.max_in_flight)
    ends_at_s = sender.started_s + ends_s / speed
    serials = {id(job): serial for serial, job in enumerate(workload.jobs)}

    async def one(turns: list[Job], due_s: float) -> None:
        for number, job in enumerate(turns):
            if number:
                due_s = sender.clock() + _pause_ns(turns[number - 1], job) / NS / speed
            if due_s >= ends_at_s:
                return
            serial = serials[id(job)]
            body = sender.target.body(job, serial)
            await _sleep_until(due_s, sender.clock)
            async with slots:
                outcome = await sender.send(job, serial, body, due_s)
            on_outcome(replace(outcome, turn=number))

    async with asyncio.TaskGroup() as group:
        for _, turns in sessions(iter(workload.jobs)):
            due_s = sender.started_s + turns[0].at_ns / NS / speed
            if due_s >= ends_at_s:
                break
            await _sleep_until(due_s, sender.clock)
            group.create_task(one(turns, due_s))


def _pause_ns(before: Job, job: Job) -> int:
    pause_ns = job.at_ns - before.at_ns if job.think_ns is None else job.think_ns
    return max(pause_ns, 0)


async def _sleep_until(due_s: float, clock: Callable[[], float]) -> None:
    """Sleep until `due_s`, at least for one turn of the event loop. It never returns early, as
    coarse timers do.
    """
    early_s = max(0.0, due_s - clock())
    while early_s >= 0:
        await asyncio.sleep(early_s)
        early_s = due_s - clock()


async def _closed_loop(
    workload: Workload, sender: Sender, on_outcome: OnOutcome, concurrency: int
) -> None:
    left = iter(enumerate(workload.jobs))

    async def one_place() -> None:
        for serial, job in left:
            body = sender.target.body(job, serial)
            on_outcome(await sender.send(job, serial, body, sender.clock()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(workload.jobs))):
            group.create_task(one_place())
