"""Heads of HTTP/1.1 towards workers, and how a body is framed, parsed strictly and without I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.http.errors import ClientError, WorkerError
from router.http.reply import (
    EVENT_STREAM,
    Framing,
    Header,
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
