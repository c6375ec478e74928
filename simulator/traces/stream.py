"""The jobs of a workload as one passes through them, with what a run wants to tell about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simulator.traces.errors import ErrorLog, TraceError
from simulator.traces.job import Job

MAX_SESSION_JOBS = 2_000_000


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the loads that follow each other. Lifetime: workload."""

    start_ns: int
    end_ns: int  # arrivals lie in [start_ns, end_ns)
    rate_per_s: float
    requests: int  # as planned, whatever part of the workload is taken
    warm_up: bool = False  # not to be reported


@dataclass(frozen=True, slots=True)
class JobStream:
    """One reading of a source, in order of arrival; nothing but what is ahead is held.

    Lifetime: stream. Open the source again to read it again. Iterating raises `TraceError` for a
    file that is damaged or has too many wrong lines.
    """

    name: str  # short, for tables
    block_tokens: int  # prompt tokens an id stands for
    jobs: Iterator[Job]
    total: int | None  # number of jobs, where it is known beforehand
    errors: ErrorLog  # wrong lines that were left out so far
    origin: str  # where the requests come from, one line for a report
    fraction_read: Callable[[], float]  # of the source, in [0, 1]: for progress bars
    stages: tuple[Stage, ...] = ()  # of a ladder of loads: which one an arrival belongs to


def sessions(jobs: Iterator[Job]) -> list[tuple[str | None, list[Job]]]:
    """The jobs by conversation, conversations in order of their first arrival, turns in order.

    A job without a session is a conversation of its own (None). Raises `TraceError` above
    `MAX_SESSION_JOBS` jobs, which a closed loop would have to hold.
    """
    groups: list[tuple[str | None, list[Job]]] = []
    by_name: dict[str, list[Job]] = {}
    for count, job in enumerate(jobs):
        if count == MAX_SESSION_JOBS:
            raise TraceError(
                f"more than {MAX_SESSION_JOBS} requests: a closed loop holds its sessions; "
                "take fewer requests"
            )
        turns = by_name.get(job.session) if job.session is not None else None
        if turns is None:
            turns = []
            groups.append((job.session, turns))
            if job.session is not None:
                by_name[job.session] = turns
        turns.append(job)
    return groups
