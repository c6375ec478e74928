"""Heads of HTTP/1.1 towards workers, and how a body is framed, parsed strictly and without I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

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
# Headers of a reply that say how to read it.
_NOTED = frozenset(
    {b"content-length", b"transfer-encoding", b"connection", b"content-type", b"content-encoding"}
)
_NOTHING = (b"",)
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
    status = int(code)
    headers: list[Header] = []
    noted: dict[bytes, list[bytes]] = {}  # values of the headers that say how to read the reply
    for name, value in _FIELD.findall(head, status_line.end()):
        lower, value = name.lower(), value.strip(b" \t")
        if lower in _NOTED:
            noted.setdefault(lower, []).append(value)
        elif lower.startswith(OUR_PREFIX):
            continue
        headers.append((name, value))
    if status == 101:
        raise WorkerError("garbage", "the worker switched protocols without being asked")
    framing, length = _framing(status, method, noted, minor)
    options = _options(noted.get(b"connection", ()))
    persistent = b"close" not in options and (minor == b"1" or b"keep-alive" in options)
    kinds = noted.get(b"content-type", _NOTHING)
    return ReplyHead(
        status,
        reason,
        tuple(headers),
        framing,
        length,
        reusable=persistent and framing is not Framing.CLOSE,
        event_stream=kinds[-1][: len(EVENT_STREAM)].lower() == EVENT_STREAM,
        coded=b"content-encoding" in noted,
    )


def _options(values: Iterable[bytes]) -> frozenset[bytes]:
    """The options of the values of `Connection`, in lower case."""
    return frozenset(one.strip() for value in values for one in value.lower().split(b","))


def _framing(
    status: int, method: str, noted: Mapping[bytes, list[bytes]], minor: bytes
) -> tuple[Framing, int]:
    """How the body ends, and its length where that is given (RFC 9112, section 6.3)."""
    lengths = noted.get(b"content-length")
    codings = noted.get(b"transfer-encoding")
    chunked = codings is not None and len(codings) == 1 and codings[0].lower() == b"chunked"
    if codings and (not chunked or lengths or minor == b"0"):
        raise WorkerError("garbage", "the worker's reply can be framed in more than one way")
    length = 0
    if lengths:
        if any(other != lengths[0] for other in lengths):
            raise WorkerError("garbage", "the worker's reply has several lengths")
        if not lengths[0].isdigit() or len(lengths[0]) > MAX_LENGTH_DIGITS:
            raise WorkerError("garbage", "the worker's reply has a length that is no number")
        length = int(lengths[0])
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
    skip = _of_connection(request.headers, REPLACED)
    lines = [
        f"{request.method} {base_path}{request.target} HTTP/1.1".encode(),
        b"Host: " + host,
        *[
            b"%b: %b" % header
            for header in request.headers
            if (lower := header[0].lower()) not in skip and not lower.startswith(INTERNAL_PREFIX)
        ],
        *[b"%b: %b" % header for header in request.internal_headers],
    ]
    if request.body or request.method not in BODYLESS_METHODS:
        lines.append(b"Content-Length: %d" % len(request.body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """`headers` without those of one connection; order and case kept."""
    skip = _of_connection(headers, HOP_BY_HOP)
    return [header for header in headers if header[0].lower() not in skip]


def _of_connection(headers: Iterable[Header], known: frozenset[bytes]) -> frozenset[bytes]:
    """The `known` names, and those that `Connection` names, in lower case."""
    values = [value for name, value in headers if len(name) == 10 and name.lower() == b"connection"]
    return known | _options(values) if values else known
