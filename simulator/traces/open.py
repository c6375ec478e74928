"""Opens any source of requests: a trace file or a generator, cut and timed as asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simulator.replay.setup import WorkloadSpec
from simulator.traces.chain import Chainer
from simulator.traces.errors import ErrorLog, TraceError
from simulator.traces.formats import Reading, file_jobs, find_format
from simulator.traces.generators.table import PREFIX, find_generator
from simulator.traces.job import Job
from simulator.traces.parts import opened
from simulator.traces.stream import JobStream, Stage, sessions
from simulator.traces.timing import check_timing, chosen, count_and_rate, faster

__all__ = ["Chainer", "JobStream", "Stage", "TraceError", "open_jobs", "sessions"]


def open_jobs(spec: WorkloadSpec, seed: int = 0) -> JobStream:
    """Starts a reading of `spec.source`; each call starts anew and gives the same jobs.

    Order of what `spec` asks: spread, skip, seconds and requests in recorded time, then speed or
    rate.
    A rate is reached by one factor on all times, which takes a first pass over the chosen part.
    Raises `TraceError` for a source that cannot be opened or a value that is out of range; what
    is wrong with single lines is in the stream's `errors`.
    """
    check_timing(spec)
    if spec.rate_per_s is None:
        stream = _recorded(spec, seed)
        total, factor = stream.total, spec.speed
    else:
        total, rate = count_and_rate(_recorded(spec, seed).jobs)
        stream = _recorded(spec, seed)
        factor = spec.rate_per_s / rate
    return JobStream(
        name=stream.name,
        block_tokens=stream.block_tokens,
        jobs=faster(stream.jobs, factor),
        total=total,
        errors=stream.errors,
        origin=f"{stream.origin}{_pace(spec)}",
        fraction_read=stream.fraction_read,
        stages=tuple(_faster(stage, factor) for stage in stream.stages),
    )


def _recorded(spec: WorkloadSpec, seed: int) -> JobStream:
    """The chosen part of the source at its own times."""
    if spec.source.startswith(PREFIX):
        return _generated(spec, seed)
    path = Path(spec.source)
    found = find_format(spec.format, path, spec.block_tokens)
    errors = ErrorLog(spec.source, spec.strict)
    file = opened(path)
    try:
        jobs = file_jobs(Reading(file, found.block_tokens, errors, found.options, seed), found)
    except TraceError:
        file.close()
        raise
    return JobStream(
        name=path.name.split(".", 1)[0] or path.name,
        block_tokens=found.block_tokens,
        jobs=chosen(jobs, spec),
        total=None,
        errors=errors,
        origin=f"{path.name} ({found.format.name})",
        fraction_read=file.fraction_read,
    )


def _generated(spec: WorkloadSpec, seed: int) -> JobStream:
    if spec.format != "auto":
        raise TraceError(f"format {spec.format!r}: is for files; {spec.source} is a generator")
    if spec.skip_s:
        raise TraceError(f"skip_s {spec.skip_s:g}: is for files; {spec.source} is a generator")
    generator, keys = find_generator(spec.source)
    made = generator.make(keys, seed, spec.block_tokens)
    total = made.total
    if total is not None and spec.requests is not None:
        total = min(total, spec.requests)
    given = 0

    def counted() -> Iterator[Job]:
        nonlocal given
        for job in chosen(made.jobs, spec):
            given += 1
            yield job

    return JobStream(
        name=generator.name,
        block_tokens=made.block_tokens,
        jobs=counted(),
        total=total if spec.seconds is None else None,
        errors=ErrorLog(spec.source, spec.strict),
        origin=f"{generator.name}: {made.origin}",
        fraction_read=lambda: min(1.0, given / total) if total else 0.0,
        stages=made.stages,
    )


def _faster(stage: Stage, factor: float) -> Stage:
    return replace(
        stage,
        start_ns=round(stage.start_ns / factor),
        end_ns=round(stage.end_ns / factor),
        rate_per_s=stage.rate_per_s * factor,
    )


def _pace(spec: WorkloadSpec) -> str:
    parts = []
    if spec.skip_s:
        parts.append(f"without the first {spec.skip_s:g} s")
    if spec.requests is not None:
        parts.append(f"first {spec.requests} requests")
    if spec.seconds is not None:
        parts.append(f"first {spec.seconds:g} s")
    if spec.spread_s:
        parts.append(f"one instant's requests spread over {spec.spread_s:g} s")
    if spec.rate_per_s is not None:
        parts.append(f"at {spec.rate_per_s:g} requests per second")
    elif spec.speed != 1.0:
        parts.append(f"{spec.speed:g} times as fast as recorded")
    return "".join(f", {part}" for part in parts)
