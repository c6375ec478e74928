"""Selects and times the jobs of a source: a part of them, coarse clocks spread, faster or
slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice, takewhile

import msgspec

from simulator.traces.job import Job, TraceError
from simulator.traces.spec import WorkloadSpec

NS = 1_000_000_000
GENERATOR = "gen:"  # sources that begin with it make their requests
MAX_GAP_S = 30 * 86_400  # without any request
MAX_SECONDS = 1e9  # that a source may be cut at or spread over
MAX_BLOCK_TOKENS = 1 << 24
MAX_SPREAD_JOBS = 100_000  # of one instant: they are held


def check_timing(spec: WorkloadSpec) -> None:
    """Raise `TraceError` for a value that is out of range."""
    for name in ("speed", "rate_per_s", "seconds"):
        value = getattr(spec, name)
        if value is not None and not 0 < value < math.inf:
            raise TraceError(f"{name} {value:g}: expected a number above 0")
    if not 0 <= spec.spread_s <= MAX_SECONDS:
        raise TraceError(f"spread_s {spec.spread_s:g}: expected 0..{MAX_SECONDS:g} seconds")
    if not 0 <= spec.skip_s <= MAX_SECONDS:
        raise TraceError(f"skip_s {spec.skip_s:g}: expected 0..{MAX_SECONDS:g} seconds")
    if spec.seconds is not None and spec.seconds > MAX_SECONDS:
        raise TraceError(f"seconds {spec.seconds:g}: expected at most {MAX_SECONDS:g}")
    if spec.block_tokens is not None and spec.block_tokens > MAX_BLOCK_TOKENS:
        raise TraceError(f"block_tokens {spec.block_tokens}: expected at most {MAX_BLOCK_TOKENS}")
    for name in ("requests", "block_tokens"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise TraceError(f"{name} {value}: expected 1 or more")
    if spec.rate_per_s is not None and spec.speed != 1.0:
        raise TraceError("speed and rate_per_s: give one of them")
    if spec.resample and spec.source.startswith(GENERATOR):
        raise TraceError(
            f"resample: is for files; {spec.source} makes other requests with every seed already"
        )


def chosen(jobs: Iterator[Job], spec: WorkloadSpec) -> Iterator[Job]:
    """Return the part of `jobs` that `spec` asks for, in recorded time. If `spec` asks for it, jobs
    that come at one instant are spread in time.
    """
    if spec.spread_s:
        jobs = spread(jobs, round(spec.spread_s * NS))
    if spec.skip_s:
        jobs = _after(jobs, round(spec.skip_s * NS))
    if spec.seconds is not None:
        end_ns = round(spec.seconds * NS)
        jobs = takewhile(lambda job: job.at_ns < end_ns, jobs)
    return islice(jobs, spec.requests) if spec.requests is not None else jobs


def _after(jobs: Iterator[Job], start_ns: int) -> Iterator[Job]:
    """Yield the jobs from `start_ns` on, with times counted from there."""
    for job in dropwhile(lambda job: job.at_ns < start_ns, jobs):
        yield msgspec.structs.replace(job, at_ns=job.at_ns - start_ns)


def spread(jobs: Iterable[Job], span_ns: int) -> Iterator[Job]:
    """Spread jobs that come at one instant evenly over the `span_ns` after it, or up to the next
    instant with jobs. Traces recorded on a coarse clock put ten requests on one instant, although
    clients did not send them together.
    """
    group: list[Job] = []
    for job in jobs:
        if group and job.at_ns != group[0].at_ns:
            yield from _spread(group, min(span_ns, job.at_ns - group[0].at_ns))
            group = []
        elif len(group) == MAX_SPREAD_JOBS:
            raise TraceError(f"spread_s: more than {MAX_SPREAD_JOBS} requests at one instant")
        group.append(job)
    yield from _spread(group, span_ns)


def _spread(group: list[Job], span_ns: int) -> Iterator[Job]:
    for index, job in enumerate(group):
        at_ns = job.at_ns + span_ns * index // len(group)
        yield msgspec.structs.replace(job, at_ns=at_ns)


def faster(jobs: Iterable[Job], factor: float) -> Iterator[Job]:
    """Divide times and the client's pauses by `factor`, so that sessions keep their shape.

    Raises `TraceError` for a month without a request, which means a damaged time or a wrong factor;
    a replay would have to let all of that time pass.
    """
    limit_ns, before_ns = MAX_GAP_S * NS * min(factor, 1e9), 0
    for job in jobs:
        think_ns = job.think_ns
        if job.at_ns - before_ns > limit_ns or (think_ns or 0) > limit_ns:
            gap_s = max(job.at_ns - before_ns, think_ns or 0) / factor / NS
            raise TraceError(
                f"a pause of {gap_s:.3g} s at a request for {job.prompt_tokens} tokens: expected "
                f"at most {MAX_GAP_S} s; is a time damaged, or the speed or rate too low?"
            )
        before_ns = job.at_ns
        if factor != 1.0:
            think_ns = None if think_ns is None else round(think_ns / factor)
            job = msgspec.structs.replace(job, at_ns=round(job.at_ns / factor), think_ns=think_ns)
        yield job


def count_and_rate(jobs: Iterable[Job]) -> tuple[int, float]:
    """Return the number of jobs and their mean rate per second from first to last arrival. Raises
    `TraceError` if there is no such rate, because there is only one request, or all come at once.
    """
    count, first_ns, last_ns = 0, 0, 0
    for job in jobs:
        first_ns = job.at_ns if not count else first_ns
        last_ns = job.at_ns
        count += 1
    if last_ns == first_ns:
        raise TraceError("rate_per_s: all requests arrive at once, so there is no rate to change")
    return count, (count - 1) * NS / (last_ns - first_ns)
