"""The formats of trace files: how they are recognized, and how their lines become jobs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from simulator.traces import (
    access_log,
    chat_file,
    mooncake,
    near_miss,
    prompt_text,
    request_log,
    session_file,
    span_file,
    tables,
    weka_file,
)
from simulator.traces.files import TraceParts, opened
from simulator.traces.job import MIN_LINES_JUDGED, ErrorLog, Job, LineError, TraceError
from simulator.traces.options import name_of, parse_options
from simulator.traces.timing import NS

Parse = Callable[[bytes], Job | None]  # None: a line that is no request, a heading for example
MAX_HELD_JOBS = 100_000
MAX_HELD_BYTES = 512 << 20
_JOB_BYTES = 400  # of one that is held, besides its ids, roughly


def read_jobs(
    lines: Iterable[tuple[int, bytes]], parse: Parse, errors: ErrorLog, slack_ns: int = 0
) -> Iterator[Job]:
    """Yield the jobs of `lines` in order of arrival; jobs at the same time keep the file's order.

    A line may be up to `slack_ns` older than the newest one before it (logs are written when a
    request ends); an older line is an error. To sort them, at most `MAX_HELD_JOBS` jobs are held,
    with at most `MAX_HELD_BYTES` bytes.
    """
    held: list[tuple[int, int, Job]] = []
    newest_ns, given_ns, count, held_bytes, number = -(1 << 62), -(1 << 62), 0, 0, 0
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
    if not count:
        raise errors.nothing_read()
    errors.judge_whole(number)
    while held:
        yield heappop(held)[2]


def _too_old(by_ns: int, slack_ns: int) -> str:
    allowed = f"at most {slack_ns / 1e9:g} s" if slack_ns else "never"
    return (
        f"timestamp: goes back, {by_ns / 1e9:g} s before an earlier line; it may {allowed}: sort "
        "the lines by time"
    )


def from_zero(jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the same jobs, shifted so that the first arrives at 0."""
    first_ns = None
    for job in jobs:
        if first_ns is None:
            first_ns = job.at_ns
        yield msgspec.structs.replace(job, at_ns=job.at_ns - first_ns)


LOOKED_AT_LINES = 10  # first lines, one of which must show the format


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of formats that have none."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of one file, or of its parts. Lifetime: stream."""

    file: TraceParts
    block_tokens: int
    errors: ErrorLog
    options: Any  # of the format's own kind
    seed: int
    notes: list[Callable[[], Iterable[str]]] = field(default_factory=list)  # the format adds them


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of trace file: how to recognize it and how to read it."""

    name: str
    about: str  # one line for help
    block_tokens: int  # default prompt tokens that an id stands for
    recognizes: Callable[[bytes], bool]  # one of the file's first lines
    read: Callable[[Reading], Iterator[Job]]
    # Returns a line's block size, or None; gets the options, too. None: lines have no size.
    block_size_of: Callable[[bytes, Any], int | None] | None = None
    options: type[msgspec.Struct] = NoOptions


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """A file's format, the options given for it, and its block size."""

    format: Format
    options: Any
    block_tokens: int


def find_format(spec: str, path: Path, block_tokens: int | None) -> FoundFormat:
    """Return the format that `spec` names (`NAME?key=value`), or for "auto" the format that
    recognizes the first lines. Raises `TraceError` for an unknown name or key, and for a file that
    no format recognizes.
    """
    name = name_of(spec)
    known = ", ".join(one.name for one in FORMATS)
    named = [one for one in FORMATS if one.name == name]
    if name != "auto" and not named:
        raise TraceError(f"format {name!r}: expected auto, {known}")
    head = _head(path)
    found = named or [one for raw in head for one in FORMATS if one.recognizes(raw)]
    if not found:
        hint = near_miss.hint_of(head) or (
            f"{near_miss.cut(head)}name one of: {known}, with --format; `warmroute-sim sources` "
            "lists the fields of each"
        )
        raise TraceError(f"{path}: its first lines are of no known format; {hint}")
    one = found[0]
    options = parse_options("?".join((one.name, spec.partition("?")[2])), one.options)
    return FoundFormat(one, options, block_tokens or _block_size_in(path, one, options))


def file_jobs(reading: Reading, found: FoundFormat) -> Iterator[Job]:
    """Return the jobs of an open file, in order of arrival."""
    return found.format.read(reading)


def _block_size_in(path: Path, form: Format, options: Any) -> int:
    """Return the block size of the first line in the file that has one, else the format's
    default.
    """
    if form.block_size_of is None:
        return form.block_tokens
    file = opened(path)
    try:
        for _, raw in file.lines(ErrorLog(str(path))):
            size = form.block_size_of(raw, options)
            if size is not None:
                return size
    finally:
        file.close()
    return form.block_tokens


def _head(path: Path) -> list[bytes]:
    """Return the first lines of a file. Raises `TraceError` if it has none."""
    file, errors = opened(path), ErrorLog(str(path))
    try:
        head = [raw for _, raw in islice(file.lines(errors), LOOKED_AT_LINES)]
    finally:
        file.close()
    if not head:
        raise errors.nothing_read()
    return head


def _by_line(
    parser: Callable[[int], Parse], slack_s: int = 0, from_first: bool = True
) -> Callable[[Reading], Iterator[Job]]:
    """Return the function that reads a format with one request a line.

    With `from_first`, the first request arrives at 0.
    """

    def read(reading: Reading) -> Iterator[Job]:
        lines, parse = reading.file.lines(reading.errors), parser(reading.block_tokens)
        jobs = read_jobs(lines, parse, reading.errors, slack_s * NS)
        return from_zero(jobs) if from_first else jobs

    return read


def _read_request_log(reading: Reading) -> Iterator[Job]:
    def parser(block_tokens: int) -> Parse:
        return request_log.parser(block_tokens, reading.options.model)

    jobs = _by_line(parser, request_log.SLACK_S)(reading)
    return request_log.continued(jobs, reading.block_tokens) if reading.options.turns else jobs


def _read_access_log(reading: Reading) -> Iterator[Job]:
    reader = access_log.AccessLogReader(reading.options)
    reading.notes.append(reader.notes)
    return _by_line(lambda _: reader.parse, request_log.SLACK_S)(reading)


def _read_chats(reading: Reading) -> Iterator[Job]:
    reader = chat_file.ChatReader(reading.block_tokens, reading.options, reading.seed)
    reading.notes.append(reader.notes)
    jobs = _by_line(lambda _: reader.parse, request_log.SLACK_S)(reading)
    return request_log.continued(jobs, reading.block_tokens)


def _read_spans(reading: Reading) -> Iterator[Job]:
    reader = span_file.SpanReader(reading.block_tokens, reading.options)
    reading.notes.append(reader.notes)
    spans = span_file.spans_of(reading.file.lines(reading.errors), reading.errors)
    jobs = read_jobs(spans, reader.parse, reading.errors, request_log.SLACK_S * NS)
    return request_log.continued(from_zero(jobs), reading.block_tokens)


def _by_session(
    count: Callable[[Iterable[tuple[int, bytes]]], int],
    read: Callable[
        [Iterable[tuple[int, bytes]], ErrorLog, Iterator[int], int, float], Iterator[Job]
    ],
) -> Callable[[Reading], Iterator[Job]]:
    """Return the function that reads a format with one session a line and no start times.

    `count` returns the number of sessions that need a start of their own.
    """

    def read_all(reading: Reading) -> Iterator[Job]:
        path, options = reading.file.path, reading.options
        starts = count(opened(path).lines(ErrorLog(str(path))))
        return read(
            reading.file.lines(reading.errors),
            reading.errors,
            session_file.starts_ns(options, starts, reading.seed),
            reading.block_tokens,
            options.gap_s,
        )

    return read_all


def _has(*keys: str) -> Callable[[bytes], bool]:
    def recognizes(raw: bytes) -> bool:
        try:
            line = msgspec.json.decode(raw)
        except mooncake.DECODE_ERRORS:
            return False
        return isinstance(line, dict) and all(key in line for key in keys)

    return recognizes


def _is_request_log(raw: bytes) -> bool:
    return _has("format", "version")(raw) or _has("at", "chain", "prompt_tokens")(raw)


# The first format that recognizes a line is used: Qwen's lines have Mooncake's fields, too.
FORMATS = (
    Format(
        "qwen",
        "JSON lines: chat_id, parent_chat_id, timestamp (s), other fields as in mooncake",
        mooncake.QWEN_BLOCK_TOKENS,
        _has("chat_id", "timestamp", "input_length"),
        _by_line(mooncake.qwen_parser),
    ),
    Format(
        "mooncake",
        "JSON lines: timestamp (ms), input_length, output_length, hash_ids, session_id",
        mooncake.BLOCK_TOKENS,
        _has("timestamp", "input_length"),
        _by_line(mooncake.parser, from_first=False),
    ),
    Format(
        "weka",
        "JSON lines, one per session with its sub-agents: hash_id_scope, requests",
        weka_file.BLOCK_TOKENS,
        _has("requests", "block_size", "hash_id_scope"),
        _by_session(weka_file.count_traces, weka_file.read_traces),
        weka_file.block_size_of,
        session_file.SessionOptions,
    ),
    Format(
        "sessions",
        "JSON lines, one per session: id, block_size, requests with t, in, out, think_time",
        session_file.BLOCK_TOKENS,
        _has("requests", "block_size"),
        _by_session(session_file.count_roots, session_file.read_sessions),
        session_file.block_size_of,
        session_file.SessionOptions,
    ),
    Format(
        "requests",
        "the router's request log",
        request_log.BLOCK_TOKENS,
        _is_request_log,
        _read_request_log,
        request_log.block_size_of,
        request_log.RequestLogOptions,
    ),
    Format(
        "access_log",
        "the router's access log: times and token counts; requests share nothing",
        prompt_text.BLOCK_TOKENS,
        _has("at", "path", "prompt_tokens", "bytes_in"),
        _read_access_log,
        options=access_log.AccessLogOptions,
    ),
    Format(
        "otel",
        "OpenTelemetry spans, OTLP JSON lines, with gen_ai attributes",
        prompt_text.BLOCK_TOKENS,
        _has("resourceSpans"),
        _read_spans,
        options=prompt_text.TextOptions,
    ),
    Format(
        "chats",
        "JSON lines: OpenAI bodies with messages, prompt or input, batches, logs",
        prompt_text.BLOCK_TOKENS,
        chat_file.is_chat,
        _read_chats,
        options=chat_file.ChatOptions,
    ),
    Format(
        "azure",
        "CSV: TIMESTAMP, ContextTokens, GeneratedTokens; requests share nothing",
        tables.BLOCK_TOKENS,
        tables.is_azure,
        _by_line(tables.azure_parser, slack_s=1),
    ),
    Format(
        "burstgpt",
        "CSV: Timestamp (s), Request tokens, Response tokens; requests share nothing",
        tables.BLOCK_TOKENS,
        tables.is_burstgpt,
        _by_line(tables.burstgpt_parser, slack_s=1),
    ),
)
