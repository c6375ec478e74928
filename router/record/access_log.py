"""The access log: a JSON line for each inference request, for people and for what gathers logs.

The event loop fills in a `Visit` (`router.request.visits`) and puts it into a bounded queue; a
thread makes lines and writes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from router.record.log_files import Background, LogFile

log = logging.getLogger(__name__)

STDOUT = "-"
_WAITING = 16_384
_WAITING_BYTES = 32 << 20
_LINE_BYTES = 1_024  # of a line, or of what becomes one, roughly
_CLOSE_S = 5.0  # a disk that hangs must not keep the router from ending


class AccessLine(msgspec.Struct, frozen=True):
    """One request. Times in ms; null: unknown, or it did not come to that."""

    at: float  # arrival, unix seconds
    id: str
    trace: str | None  # of `traceparent` (W3C Trace Context), its trace id
    client: str | None  # address
    tenant: str | None
    path: str
    model: str | None
    stream: bool
    status: int
    finish: str  # ok, rejected, client_left, internal_error, or the worker's kind of error
    code: str | None  # of a refusal
    worker: int | None  # the last one
    attempts: int
    moved: int  # how often the answer went on at another worker
    bytes_in: int  # of the body
    bytes_out: int
    prompt_tokens: int | None  # as the router counted them
    output_tokens: int | None
    expected_hit_tokens: int | None
    cached_tokens: int | None  # as the worker reported
    wait_ms: float | None  # at the router, to the first dispatch
    ttft_ms: float | None
    total_ms: float


class Told(Protocol):
    """What becomes a line."""

    def line(self, unix_offset_s: float) -> AccessLine:
        """In the thread of the log."""
        ...


class AccessLog:
    """Lifetime: process."""

    def __init__(self, write: Writer, unix_offset_s: float) -> None:
        """`unix_offset_s`: what the router's clock lacks to unix time."""
        self._sink = _Sink(write, unix_offset_s)
        self._background: Background[Told] = Background(
            "access log", self._sink, _WAITING, _WAITING_BYTES
        )
        self._no_room = 0

    @property
    def written(self) -> int:
        """Lines so far."""
        return self._sink.written

    @property
    def lost(self) -> int:
        """Lines so far, for want of room in the queue or on the disk."""
        return self._no_room + self._sink.lost

    def put(self, told: Told) -> None:
        """Hand over."""
        if not self._background.put(told, _LINE_BYTES):
            self._no_room += 1
            if self._no_room & (self._no_room - 1) == 0:
                log.error("access log: %d lines lost: the disk is too slow", self._no_room)

    def reopen(self) -> None:
        """The file was moved away: go on in a new one. Returns at once."""
        self._background.reopen()

    def close(self) -> None:
        """Write what waits. Takes up to five seconds, after which the rest is lost."""
        if left := self._background.close(_CLOSE_S):
            log.error("access log: %d lines were not written before the end", left)


class Writer(Protocol):
    """Where lines go, in the thread of the log."""

    def append(self, data: bytes) -> None:
        """Write whole lines. Raises OSError."""
        ...

    def reopen(self) -> None:
        """Raises OSError."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class File:
    """A file that is turned over at a bound. Lifetime: process."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Raises OSError that says which file cannot be written and why."""
        try:
            self._file = LogFile(path, limit_bytes)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(f"access_log: cannot write {path}: {why}") from error

    def append(self, data: bytes) -> None:
        """See `Writer`."""
        self._file.make_room(len(data))
        self._file.append(data)

    def reopen(self) -> None:
        """See `Writer`."""
        self._file.reopen()

    def close(self) -> None:
        """See `Writer`."""
        self._file.close()


class Stdout:
    """Lifetime: process."""

    def append(self, data: bytes) -> None:
        """See `Writer`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(1, rest) :]

    def reopen(self) -> None:
        """See `Writer`."""

    def close(self) -> None:
        """See `Writer`."""


class _Sink:
    """Makes lines and writes them, in the thread of the log. Lifetime: process."""

    def __init__(self, writer: Writer, unix_offset_s: float) -> None:
        self.written = 0
        self.lost = 0
        self._writer = writer
        self._unix_offset_s = unix_offset_s
        self._encoder = msgspec.json.Encoder()

    def write(self, items: Sequence[Told]) -> None:
        """See `Sink`."""
        count, encode = len(items), self._encoder.encode
        parts = [encode(item.line(self._unix_offset_s)) + b"\n" for item in items]
        try:
            self._writer.append(b"".join(parts))
        except OSError as error:
            if self.lost & (self.lost - 1) == 0 or count > 1:
                log.error("access log: %d lines lost: %s", self.lost + count, error)
            self.lost += count
            return
        self.written += count

    def reopen(self) -> None:
        """See `Sink`."""
        try:
            self._writer.reopen()
        except OSError as error:
            log.error("access log: cannot be opened anew: %s", error.strerror)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


def access_log(where: str, limit_bytes: int, unix_offset_s: float) -> AccessLog:
    """A log to a file, or with `STDOUT` to standard output. Raises OSError."""
    writer: Writer = Stdout() if where == STDOUT else File(Path(where), limit_bytes)
    return AccessLog(writer, unix_offset_s)
