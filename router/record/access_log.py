"""The access log: a JSON line for each inference request, for people and for what gathers logs.

The event loop puts a `RequestRecord` into a bounded queue; a thread makes lines and writes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from router.record.log_files import Background, LogFile
from router.record.request_record import CLIENT_LEFT, RequestRecord

log = logging.getLogger(__name__)

STDOUT = "-"
_WAITING = 16_384
_WAITING_BYTES = 32 << 20
_LINE_BYTES = 1_024  # of a line, or of what becomes one, roughly
_MODEL_CHARS = 256
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


def line_of(record: RequestRecord, unix_offset_s: float) -> AccessLine:
    """What the log tells of a request."""
    arrival, last, outcomes = record.arrival, record.last, record.outcomes
    status = next((one.status for one in reversed(outcomes) if one.status is not None), None)
    usages = [one.usage for one in outcomes if one.usage is not None]
    finish, code = "client_left", None
    if (ended := record.ended) is not None:
        finish, code = ended.finish, ended.code
    if record.refused is not None:
        status, code = record.refused
        finish = "rejected"
    if record.broke:
        finish = record.broke
    if record.broke == "internal_error" and not status:
        status = 500
    if record.late_status is not None:  # a worker's says nothing of an answer that it did not end
        status = record.late_status
    known = arrival is not None and code != "model_not_found"
    prompt = None if arrival is None else arrival.prompt_tokens
    hit = None
    if prompt is not None and last is not None:
        hit = max(prompt - last.uncached_tokens, 0)
    streams = arrival is not None and arrival.stream
    events = sum(one.events for one in outcomes)
    begun_s = [one.first_byte_s for one in outcomes if one.first_byte_s is not None]
    return AccessLine(
        at=round(record.began_s + unix_offset_s, 6),
        id=record.id,
        trace=record.trace_id,
        client=record.client,
        tenant=record.tenant,
        path=record.path,
        model=arrival.model[:_MODEL_CHARS] if arrival is not None and known else None,
        stream=streams,
        status=CLIENT_LEFT if status is None else status,
        finish=finish,
        code=code,
        worker=None if last is None else last.worker_id,
        attempts=len(record.attempts),
        moved=sum(one.resumable for one in outcomes),
        bytes_in=record.bytes_in,
        bytes_out=max(sum(one.bytes_to_client for one in outcomes), record.written_bytes),
        prompt_tokens=prompt,
        output_tokens=(usages[-1].completion_tokens if usages else None) or events or None,
        expected_hit_tokens=hit,
        cached_tokens=usages[-1].cached_tokens if usages else None,
        wait_ms=_ms(record.attempts[0].sent_s if record.attempts else None, record.began_s),
        ttft_ms=_ms(begun_s[0] if begun_s else None, record.began_s) if streams else None,
        total_ms=_ms(record.end_s, record.began_s) or 0.0,
    )


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round(max(at_s - since_s, 0.0) * 1e3, 3)


class AccessLog:
    """Lifetime: process."""

    def __init__(self, write: Writer, unix_offset_s: float) -> None:
        """`unix_offset_s`: what the router's clock lacks to unix time."""
        self._sink = _Sink(write, unix_offset_s)
        self._background: Background[RequestRecord] = Background(
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

    def put(self, record: RequestRecord) -> None:
        """Hand over."""
        if not self._background.put(record, _LINE_BYTES):
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

    def reopen(self) -> None:
        """Raises OSError."""

    def close(self) -> None:
        """The end."""


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

    def write(self, items: Sequence[RequestRecord]) -> None:
        """See `Sink`."""
        count, encode = len(items), self._encoder.encode
        parts = [encode(line_of(item, self._unix_offset_s)) + b"\n" for item in items]
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
