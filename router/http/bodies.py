"""Finds the end of the body of a worker's reply: by length, by chunks, or by the end of the
connection.
"""

from __future__ import annotations

import re
from typing import Protocol

from router.http.errors import WorkerError
from router.http.reply import (
    Framing,
    RelayLimits,
    ReplyHead,
)

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,12})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")


class Body(Protocol):
    """Reads a reply's body piece by piece, and knows when the body has ended."""

    taken: int  # bytes of the last `feed` that belong to this body
    done: bool

    @property
    def between_chunks(self) -> bool:
        """True if another chunk may be inserted here."""

    def feed(self, data: bytes) -> bytes:
        """Return the payload in `data`. Raises WorkerError("garbage") for broken framing."""


class LengthBody:
    """A body whose number of bytes is known from its `Content-Length`."""

    def __init__(self, length: int) -> None:
        self.taken = 0
        self._left = length
        self.done = length == 0

    @property
    def between_chunks(self) -> bool:
        """False: this body has no chunks."""
        return False

    def feed(self, data: bytes) -> bytes:
        size = len(data)
        if size > self._left:
            data = data[: self._left]
            size = self._left
        self._left -= size
        self.taken = size
        self.done = self._left == 0
        return data


class CloseBody:
    """A body that lasts until the worker closes the connection."""

    def __init__(self) -> None:
        self.taken = 0
        self.done = False

    @property
    def between_chunks(self) -> bool:
        """False: this body has no chunks."""
        return False

    def feed(self, data: bytes) -> bytes:
        self.taken = len(data)
        return data


class ChunkedBody:
    """A chunked body (RFC 9112, section 7.1); chunk extensions and trailers are skipped.

    The parser is strict where two readers could disagree: a size line or a trailer must end in
    CRLF, CRLF must follow a chunk's data, and the lengths of size lines, trailers and the trailer
    section are limited.
    """

    def __init__(self, line_bytes: int, trailer_bytes: int) -> None:
        self.taken = 0
        self.done = False
        self._line_bytes = line_bytes
        self._trailer_left = trailer_bytes
        self._left = 0  # missing bytes of the present chunk's data, with its CRLF
        self._line = b""  # the beginning of an incomplete size line or trailer
        self._in_trailers = False

    @property
    def between_chunks(self) -> bool:
        """True if the last chunk is complete and no other has begun."""
        return not (self._left or self._line or self._in_trailers or self.done)

    def feed(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        at = 0
        end = len(data)
        while at < end and not self.done:
            if self._left:
                at = self._skip_chunk(data, at, pieces)
            else:
                at = self._read_line(data, at)
        self.taken = at
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _skip_chunk(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Append the bytes of the current chunk in `data` to `pieces`; return the position after
        them.
        """
        stop = min(len(data), at + self._left)
        payload_stop = min(stop, at + self._left - 2)
        if payload_stop > at:
            pieces.append(data[at:payload_stop])
        closing = data[max(at, payload_stop) : stop]
        self._left -= stop - at
        # `closing` is the part of the CRLF seen now: its end, if the CRLF was split.
        if closing and closing != b"\r\n"[2 - self._left - len(closing) : 2 - self._left]:
            raise WorkerError("garbage", "a chunk of the worker's reply is longer than its size")
        return stop

    def _read_line(self, data: bytes, at: int) -> int:
        """Read a chunk's size line or a trailer, or the part of it that has arrived; return the
        position after it.
        """
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline + 1
        line = self._line + data[at:stop] if self._line else data[at:stop]
        if self._in_trailers:
            self._trailer_left -= stop - at
        if len(line) > self._line_bytes or self._trailer_left < 0:
            raise WorkerError(
                "garbage", "a chunk line or trailer of the worker's reply is too long"
            )
        if newline < 0:
            self._line = line
            return stop
        self._line = b""
        if line[-2:] != b"\r\n":
            raise WorkerError("garbage", "a chunk line of the worker's reply ends without CRLF")
        if self._in_trailers:
            self._end_trailer(line[:-2])
        else:
            self._begin_chunk(line[:-2])
        return stop

    def _begin_chunk(self, line: bytes) -> None:
        size_line = _SIZE_LINE.fullmatch(line)
        if size_line is None:
            raise WorkerError("garbage", "a chunk of the worker's reply has no readable size")
        size = int(size_line[1], 16)
        if size:
            self._left = size + 2
        else:
            self._in_trailers = True

    def _end_trailer(self, line: bytes) -> None:
        if not line:
            self.done = True
        elif not _TRAILER.fullmatch(line):
            raise WorkerError("garbage", "a trailer of the worker's reply is no header")


def follow(head: ReplyHead, limits: RelayLimits) -> Body:
    """Return the object that reads the body of a reply with this `head`."""
    if head.framing is Framing.CHUNKED:
        return ChunkedBody(limits.chunk_line_bytes, limits.header_bytes)
    if head.framing is Framing.CLOSE:
        return CloseBody()
    return LengthBody(head.length)
