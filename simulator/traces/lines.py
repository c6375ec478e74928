"""From lines to jobs in order of arrival: what is wrong is told, what is late is put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

import msgspec

from simulator.traces.errors import MIN_LINES_JUDGED, ErrorLog, LineError
from simulator.traces.job import Job

Parse = Callable[[bytes], Job | None]  # None: a line that is no request, a heading for example
MAX_HELD_JOBS = 100_000
MAX_HELD_BYTES = 512 << 20
_JOB_BYTES = 400  # of one that is held, besides its ids, roughly


def read_jobs(
    lines: Iterable[tuple[int, bytes]], parse: Parse, errors: ErrorLog, slack_ns: int = 0
) -> Iterator[Job]:
    """Yields the jobs of `lines` in order of arrival, those of one instant in the file's order.

    A line may be up to `slack_ns` older than the newest one before it (logs are written when a
    request ends); older ones are wrong. To put them in order at most `MAX_HELD_JOBS` are held, and
    no more than make up `MAX_HELD_BYTES`.
    """
    held: list[tuple[int, int, Job]] = []
    newest_ns, given_ns, count, held_bytes = -(1 << 62), -(1 << 62), 0, 0
    for number, raw in lines:
        if number == MIN_LINES_JUDGED:
            errors.judge(number)
        try:
            job = parse(raw)
            if job is None:
                continue
            at_ns = job.at_ns
            if at_ns < newest_ns - slack_ns or at_ns < given_ns:
                raise LineError(_too_old(newest_ns - at_ns, slack_ns))
        except LineError as error:
            errors.add(number, error)
            continue
        count += 1
        newest_ns = max(newest_ns, at_ns)
        if not slack_ns:
            yield job
            continue
        heappush(held, (at_ns, number, job))
        held_bytes += job.ids.nbytes + _JOB_BYTES
        while (
            held[0][0] < newest_ns - slack_ns
            or len(held) > MAX_HELD_JOBS
            or (held_bytes > MAX_HELD_BYTES and len(held) > 1)
        ):
            given_ns, _, ready = heappop(held)
            held_bytes -= ready.ids.nbytes + _JOB_BYTES
            yield ready
    while held:
        yield heappop(held)[2]
    if not count:
        raise errors.nothing_read()


def _too_old(by_ns: int, slack_ns: int) -> str:
    allowed = f"at most {slack_ns / 1e9:g} s" if slack_ns else "never"
    return f"timestamp: goes back, {by_ns / 1e9:g} s before an earlier line; it may {allowed}"


def from_zero(jobs: Iterable[Job]) -> Iterator[Job]:
    """The same jobs with the first arrival at 0."""
    first_ns = None
    for job in jobs:
        if first_ns is None:
            first_ns = job.at_ns
        yield msgspec.structs.replace(job, at_ns=job.at_ns - first_ns)
