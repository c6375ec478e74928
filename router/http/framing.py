"""Heads and framing of HTTP/1.1 towards workers, parsed strictly and without I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from router.http.errors import ClientError, WorkerError
from router.http.reply import (
    EVENT_STREAM,
    Framing,
    Header,
    RelayLimits,
    ReplyHead,
    UpstreamRequest,
)

# Headers that belong to one connection and are not passed on (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# What the relay writes itself, or what the server in front has already answered.
REPLACED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
INTERNAL_PREFIX = b"x-warmroute-internal-"
OUR_PREFIX = b"x-warmroute-"
BODYLESS_METHODS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})
MAX_LENGTH_DIGITS = 15  # a petabyte; longer numbers are an attack or a fault

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: (" + _VALUE + rb"))?\r\n")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _VALUE + rb")\r\n")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":" + _VALUE + rb"\r\n)*")
_TARGET = re.compile(r"/[!-~]*")
_METHOD = re.compile(r"[A-Z]{1,20}")


def parse_head(head: bytes, method: str) -> ReplyHead:
    """Read a reply's head: status line and fields, each with its CRLF, without the empty line.

    What only the router says to clients (`x-warmroute-*`) is left out: a worker may not say it.
    Raises WorkerError("garbage") for anything that two readers could frame differently: bare LF,
    folded lines, a length beside chunks, lengths that differ, an unknown transfer coding.
    """
    status_line = _STATUS.match(head)
    if status_line is None or not _FIELDS.fullmatch(head, status_line.end()):
        raise WorkerError("garbage", "the worker's reply does not begin with an HTTP/1.x head")
    minor, code, reason = status_line.groups(b"")
    headers = tuple(
        (name, value.strip(b" \t"))
        for name, value in _FIELD.findall(head, status_line.end())
        if not name.lower().startswith(OUR_PREFIX)
    )
    status = int(code)
    if status == 101:
        raise WorkerError("garbage", "the worker switched protocols without being asked")
    lengths: set[bytes] = set()
    codings: list[bytes] = []
    connection = b""
    event_stream = coded = False
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            lengths.add(value)
        elif lower == b"transfer-encoding":
            codings.append(value.lower())
        elif lower == b"connection":
            connection += b"," + value.lower()
        elif lower == b"content-type":
            event_stream = value[: len(EVENT_STREAM)].lower() == EVENT_STREAM
        elif lower == b"content-encoding":
            coded = True
    framing, length = _framing(status, method, lengths, codings, minor)
    options = [option.strip() for option in connection.split(b",")]
    persistent = b"close" not in options and (minor == b"1" or b"keep-alive" in options)
    reusable = persistent and framing is not Framing.CLOSE
    return ReplyHead(status, reason, headers, framing, length, reusable, event_stream, coded)


def _framing(
    status: int, method: str, lengths: set[bytes], codings: list[bytes], minor: bytes
) -> tuple[Framing, int]:
    """How the body ends, and its length where that is given (RFC 9112, section 6.3)."""
    if codings and (codings != [b"chunked"] or lengths or minor == b"0"):
        raise WorkerError("garbage", "the worker's reply can be framed in more than one way")
    if len(lengths) > 1:
        raise WorkerError("garbage", "the worker's reply has several lengths")
    length = 0
    if lengths:
        digits = lengths.pop()
        if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:
            raise WorkerError("garbage", "the worker's reply has a length that is no number")
        length = int(digits)
        lengths.add(digits)
    if method == "HEAD" or status < 200 or status in (204, 304):
        return Framing.NONE, 0
    if codings:
        return Framing.CHUNKED, 0
    return (Framing.LENGTH, length) if lengths else (Framing.CLOSE, 0)


def request_head(request: UpstreamRequest, host: bytes, base_path: str) -> bytes:
    """The head as the worker receives it, with the empty line that ends it.

    Raises ClientError(400) for a method or target that cannot stand in a request line.
    """
    if not _METHOD.fullmatch(request.method) or not _TARGET.fullmatch(request.target):
        raise ClientError(400, "the request's method or path has characters that HTTP forbids")
    lines = [f"{request.method} {base_path}{request.target} HTTP/1.1".encode(), b"Host: " + host]
    skip = _of_connection(request.headers, REPLACED)
    for name, value in request.headers:
        lower = name.lower()
        if lower not in skip and not lower.startswith(INTERNAL_PREFIX):
            lines.append(name + b": " + value)
    lines += [name + b": " + value for name, value in request.internal_headers]
    if request.body or request.method not in BODYLESS_METHODS:
        lines.append(b"Content-Length: %d" % len(request.body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def end_to_end(headers: Iterable[Header]) -> Iterable[Header]:
    """`headers` without those of one connection; order and case kept."""
    skip = _of_connection(headers, HOP_BY_HOP)
    return [header for header in headers if header[0].lower() not in skip]


def _of_connection(headers: Iterable[Header], known: frozenset[bytes]) -> frozenset[bytes]:
    """The `known` names, and those that `Connection` names, in lower case."""
    named: set[bytes] = set()
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            named.update(option.strip() for option in value.lower().split(b","))
    return known | named if named else known


_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,12})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")


class Body(Protocol):
    """A body's end, followed."""

    taken: int  # bytes of the last `feed` that belong to this body
    done: bool

    @property
    def between_chunks(self) -> bool:
        """One more chunk may be put in here."""

    def feed(self, data: bytes) -> bytes:
        """The payload within `data`. Raises WorkerError("garbage") for broken framing."""


class LengthBody:
    """A body of a given length."""

    def __init__(self, length: int) -> None:
        self.taken = 0
        self._left = length
        self.done = length == 0

    @property
    def between_chunks(self) -> bool:
        """It has none."""
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
    """A body that ends with its connection."""

    def __init__(self) -> None:
        self.taken = 0
        self.done = False

    @property
    def between_chunks(self) -> bool:
        """It has none."""
        return False

    def feed(self, data: bytes) -> bytes:
        self.taken = len(data)
        return data


class ChunkedBody:
    """A chunked body (RFC 9112, section 7.1): sizes are read, extensions and trailers skipped.

    Strict where leniency would let two readers disagree: a size line or trailer ends in CRLF, a
    chunk's data is followed by CRLF, and both lines and the trailer section are bounded.
    """

    def __init__(self, line_bytes: int, trailer_bytes: int) -> None:
        self.taken = 0
        self.done = False
        self._line_bytes = line_bytes
        self._trailer_left = trailer_bytes
        self._left = 0  # bytes of the present chunk's data still to come, its CRLF included
        self._line = b""  # a size line or trailer of which only the beginning has come
        self._in_trailers = False

    @property
    def between_chunks(self) -> bool:
        """The last one is whole, and no other has begun."""
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
        """Take what `data` holds of the present chunk; returns where to go on."""
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
        """Read a size line or a trailer, or its beginning; returns where to go on."""
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
    """The follower for the body that `head` announces."""
    if head.framing is Framing.CHUNKED:
        return ChunkedBody(limits.chunk_line_bytes, limits.header_bytes)
    if head.framing is Framing.CLOSE:
        return CloseBody()
    return LengthBody(head.length)
