"""The formats that a trace file may have, and how to tell which one a file has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from simulator.traces import mooncake
from simulator.traces.errors import ErrorLog, TraceError
from simulator.traces.files import TraceFile
from simulator.traces.job import Job
from simulator.traces.lines import Parse, from_zero, read_jobs

LOOKED_AT_LINES = 10  # in which one must show what the file is


@dataclass(frozen=True, slots=True)
class LineFormat:
    """A format with one request a line."""

    name: str
    about: str  # one line for help
    block_tokens: int  # prompt tokens an id stands for, where neither user nor file says
    recognizes: Callable[[bytes], bool]  # one line of the file
    parser: Callable[[int], Parse]
    slack_ns: int = 0  # how much older than the newest line before it a line may be
    absolute: bool = False  # times are of the calendar: the first arrival becomes 0


def _keys(raw: bytes) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _is_mooncake(raw: bytes) -> bool:
    keys = _keys(raw)
    return {"timestamp", "input_length"} <= keys.keys() and "chat_id" not in keys


FORMATS = (
    LineFormat(
        "mooncake",
        "JSON lines: timestamp (ms), input_length, output_length, hash_ids, session_id",
        mooncake.BLOCK_TOKENS,
        _is_mooncake,
        mooncake.parser,
    ),
)


def find_format(name: str, path: Path) -> LineFormat:
    """The format called `name`, or with "auto" the one that the file's first lines show.

    Raises `TraceError` for an unknown name, and for a file that nothing recognizes.
    """
    known = ", ".join(one.name for one in FORMATS)
    if name != "auto":
        for one in FORMATS:
            if one.name == name:
                return one
        raise TraceError(f"format {name!r}: expected auto, {known}")
    file = TraceFile(path)
    lines = file.lines(ErrorLog(str(path)))
    try:
        head = [raw for _, raw in islice(lines, LOOKED_AT_LINES)]
    finally:
        file.close()
    for raw in head:
        for one in FORMATS:
            if one.recognizes(raw):
                return one
    if not head:
        raise TraceError(f"{path}: holds no requests")
    raise TraceError(f"{path}: its first lines are of no known format; name one of: {known}")


def file_jobs(
    file: TraceFile, found: LineFormat, block_tokens: int, errors: ErrorLog
) -> Iterator[Job]:
    """The jobs of an open file, in order of arrival."""
    jobs = read_jobs(file.lines(errors), found.parser(block_tokens), errors, found.slack_ns)
    return from_zero(jobs) if found.absolute else jobs
