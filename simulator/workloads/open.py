"""Opens any source of requests, cut and timed as asked, and lists the available sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from simulator.traces.chain import Chainer
from simulator.traces.files import opened
from simulator.traces.formats import FORMATS, Reading, file_jobs, find_format
from simulator.traces.generators.table import GENERATORS, PREFIX, find_generator
from simulator.traces.job import ErrorLog, Job, JobStream, Stage, TraceError
from simulator.traces.options import option_rows
from simulator.traces.sessions import Draw, sessions
from simulator.traces.spec import WorkloadSpec
from simulator.traces.timing import check_timing, chosen, count_and_rate, faster

__all__ = ["Chainer", "JobStream", "Stage", "TraceError", "open_jobs", "sessions"]


def open_jobs(spec: WorkloadSpec, seed: int = 0) -> JobStream:
    """Open `spec.source` for reading; each call starts from the beginning and gives the same jobs.

    The steps of `spec` are applied in this order: spread, skip, seconds and requests in recorded
    time, then other sessions drawn, then speed or rate. A rate is reached by one factor on all
    times, which takes a first pass over the chosen part, or over the same draw of it. Raises
    `TraceError` for a source that cannot be opened or a value that is out of range; errors of
    single lines are in the stream's `errors`.
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
        notes=stream.notes,
    )


def _recorded(spec: WorkloadSpec, seed: int) -> JobStream:
    """Return the chosen part of the source with its jobs at their own times."""
    if spec.source.startswith(PREFIX):
        return _generated(spec, seed)
    path = Path(spec.source)
    found = find_format(spec.format, path, spec.block_tokens)
    errors = ErrorLog(spec.source, spec.strict)
    file = opened(path)
    reading = Reading(file, found.block_tokens, errors, found.options, seed)
    try:
        jobs = file_jobs(reading, found)
    except TraceError:
        file.close()
        raise
    stream = JobStream(
        name=path.name.split(".", 1)[0] or path.name,
        block_tokens=found.block_tokens,
        jobs=chosen(jobs, spec),
        total=None,
        errors=errors,
        origin=f"{path.name} ({found.format.name})",
        fraction_read=file.fraction_read,
        notes=lambda: [note for notes in reading.notes for note in notes()],
    )
    return _drawn(stream, seed) if spec.resample else stream


def _drawn(stream: JobStream, seed: int) -> JobStream:
    """Return a random draw of the stream's sessions, which is made when the first job is
    requested.
    """
    given = total = 0

    def jobs() -> Iterator[Job]:
        nonlocal given, total
        draw = Draw(stream.jobs, seed)
        total = len(draw)
        for job in draw.jobs():
            given += 1
            yield job

    return replace(
        stream,
        jobs=jobs(),
        fraction_read=lambda: given / total if total else 0.0,
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
    if spec.resample:
        parts.append("its sessions drawn anew with each seed")
    if spec.rate_per_s is not None:
        parts.append(f"at {spec.rate_per_s:g} requests per second")
    elif spec.speed != 1.0:
        parts.append(f"{spec.speed:g} times as fast as recorded")
    return "".join(f", {part}" for part in parts)


INTRODUCTION = """\
# Where requests come from

A source of requests is a file or `gen:NAME?key=value&key=value`. A file may be plain, gzip or zstd.
`warmroute-sim` recognizes the format of a file by the first lines; `--format NAME?key=value` sets
the format and its keys. [Your traffic in ten minutes](../your-traffic.md) shows the commands for
each kind of file.

The reader leaves out and counts wrong lines, and prints the first ten wrong lines. A command fails
if more than ten lines, and more than one line in a hundred, are wrong; with `--strict` a command
fails at the first wrong line. The lines of a file must be in order of time. Lines of the router's
logs, of chats and of spans may be an hour late, and lines of CSV files a second.

Text of chats and spans becomes tokens and hashes while the reader reads a line. The reader keeps
and prints no text. Without `--tokenizer FOLDER` four bytes are one token. A replay prints its
assumptions below its tables.

Options change a source in this order: `--spread` spreads requests of one instant, then `--skip`,
`--seconds` and `--requests` select a part (by recorded time), then `--resample` draws other
sessions, then `--speed` or `--rate` scales all times and pauses by one factor.

The block size of an engine must divide the number of tokens per hash id of the file, or be a
multiple of this number.
"""
SIZES = """\
A size is `1200` (always), `1200~360` (normal: mean and deviation, at least 1), `2..20` (uniform)
or `700*0.6` (log-normal: median and sigma). With the same seed a generator gives the same requests.
With the rate `inf` all requests arrive at once.
"""


def help_lines() -> Iterator[str]:
    """Yield the formats and generators with their keys, as plain text of at most 100 columns."""
    yield "formats (auto-detected; --format NAME?key=value):"
    for form in FORMATS:
        yield f"  {form.name:<15} {form.about}"
        yield from (f"    {line}" for line in _keys(form.options))
    yield "generators (gen:NAME?key=value&key=value):"
    for one in GENERATORS:
        yield f"  {one.name:<15} {one.about}"
        yield from (f"    {line}" for line in _keys(one.keys))


def _keys(kind: type) -> Iterator[str]:
    for key, default, meaning in option_rows(kind):
        yield f"{key:<13} {meaning}" + (f" [{default}]" if 0 < len(default) < 20 else "")


def markdown() -> str:
    """Return the whole text of docs/reference/traces.md."""
    lines = [INTRODUCTION, "## Formats", ""]
    lines.append("| name | content | tokens per id | key | default | meaning of the key |")
    lines.append("|---|---|---:|---|---|---|")
    for form in FORMATS:
        rows = list(option_rows(form.options)) or [("", "", "")]
        for index, row in enumerate(rows):
            head = (f"`{form.name}`", form.about, str(form.block_tokens))
            lines.append(_row(*(head if not index else ("", "", "")), *_marked(row)))
    lines += ["", "## Generators", "", SIZES]
    for one in GENERATORS:
        about = wrap(_about(one.keys), 100, break_on_hyphens=False)
        lines += [f"### `gen:{one.name}`", "", *about, ""]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        lines += [_row(*_marked(row)) for row in option_rows(one.keys)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _about(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _marked(row: tuple[str, str, str]) -> tuple[str, str, str]:
    key, default, meaning = row
    return (f"`{key}`" if key else "", f"`{default}`" if default else "", meaning)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown())
