"""Reads Mooncake-style traces: JSON lines, plain or gzip, one request a line, as a stream.

    {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}

`timestamp` is the arrival in ms; an id names the whole prefix up to and including its block of
`block_tokens` prompt tokens, so equal ids mean an equal prefix (Mooncake, Qin et al., FAST 2025).
Files list either every block (the last one usually partial) or full blocks only; both are read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

MAX_LINE_BYTES = 8 << 20
MAX_INPUT_TOKENS = 4 << 20
MAX_OUTPUT_TOKENS = 1 << 20
MAX_ARRIVAL_MS = 366 * 86_400_000
MAX_HASH_ID = (1 << 63) - 1


class TraceError(ValueError):
    """A trace that cannot be read: says the file, the line, the field and what is expected."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a workload. Lifetime: workload."""

    arrival_s: float  # seconds from the start of the workload
    input_tokens: int  # prompt length
    output_tokens: int  # tokens the answer had
    hash_ids: tuple[int, ...]  # one id per prompt block; equal ids, equal prefix
    session: str | None = None  # conversation it belongs to, where the trace says


class _Line(msgspec.Struct, frozen=True):
    """A line as it stands in the file; fields that are not named here are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int | None = None


def read_trace(path: Path, block_tokens: int = 512) -> Iterator[TraceRow]:
    """Yields the rows of `path` in file order, without holding the file in memory.

    `block_tokens` is the number of prompt tokens an id stands for. Raises `TraceError` for a file
    that cannot be opened, and for the first wrong line.
    """
    decoder = msgspec.json.Decoder(_Line)
    last_ms = 0.0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(_lines(stream, path), start=1):
                if not raw.strip():
                    continue
                where = f"{path}, line {number}"
                line = _decode(decoder, raw, where)
                _check(line, last_ms, block_tokens, where)
                last_ms = line.timestamp
                yield _row(line)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def spread_ticks(rows: Iterable[TraceRow], tick_s: float) -> Iterator[TraceRow]:
    """Spreads the rows that share one arrival time evenly over the `tick_s` seconds after it.

    Traces recorded on a coarse clock put ten requests on one instant, which nobody sent that way.
    """
    group: list[TraceRow] = []
    for row in rows:
        if group and row.arrival_s != group[0].arrival_s:
            yield from _spread(group, min(tick_s, row.arrival_s - group[0].arrival_s))
            group = []
        group.append(row)
    yield from _spread(group, tick_s)


def _spread(group: list[TraceRow], span_s: float) -> Iterator[TraceRow]:
    for index, row in enumerate(group):
        yield replace(row, arrival_s=row.arrival_s + span_s * index / len(group))


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    number = 1
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
        yield line
        number += 1


def _decode(decoder: msgspec.json.Decoder[_Line], raw: bytes, where: str) -> _Line:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{where}: {error}") from error


def _check(line: _Line, last_ms: float, block_tokens: int, where: str) -> None:
    _within(line.timestamp, last_ms, MAX_ARRIVAL_MS, f"{where}: timestamp (ms, never going back)")
    _within(line.input_length, 1, MAX_INPUT_TOKENS, f"{where}: input_length")
    _within(line.output_length, 0, MAX_OUTPUT_TOKENS, f"{where}: output_length")
    full, blocks = line.input_length // block_tokens, -(-line.input_length // block_tokens)
    _within(
        len(line.hash_ids),
        full,
        blocks,
        f"{where}: number of hash_ids for input_length {line.input_length} "
        f"in blocks of {block_tokens} tokens",
    )
    if line.hash_ids:
        _within(min(line.hash_ids), 0, MAX_HASH_ID, f"{where}: hash_ids")
        _within(max(line.hash_ids), 0, MAX_HASH_ID, f"{where}: hash_ids")


def _within(value: float, low: float, high: float, what: str) -> None:
    if not low <= value <= high:
        raise TraceError(f"{what}: {value:g} is not in {low:g}..{high:g}")


def _row(line: _Line) -> TraceRow:
    return TraceRow(
        arrival_s=line.timestamp / 1000,
        input_tokens=line.input_length,
        output_tokens=line.output_length,
        hash_ids=tuple(line.hash_ids),
        session=None if line.session_id is None else str(line.session_id),
    )
