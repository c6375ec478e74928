"""The plain-Python version of `kvkernels.reply_head`, which parses the head of a worker's reply."""

from __future__ import annotations

import re

from router.http.errors import WorkerError
from router.http.reply import EVENT_STREAM, Framing, ReplyHead

OUR_PREFIX = b"x-warmroute-"
MAX_LENGTH_DIGITS = 15
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: (" + _VALUE + rb"))?\r\n")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _VALUE + rb")\r\n")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":" + _VALUE + rb"\r\n)*")


def parse_head(head: bytes, method: str) -> ReplyHead:
    """Parse the head of a reply: status line and fields, each with its CRLF, without the empty
    line.

    Fields that only the router may send to clients (`x-warmroute-*`) are left out, because a worker
    may not send them. Raises WorkerError("garbage") for anything that two readers could frame
    differently: bare LF, folded lines, a length beside chunks, lengths that differ, an unknown
    transfer coding.
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
    """Return how the body ends, and its length if that is given (RFC 9112, section 6.3)."""
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
