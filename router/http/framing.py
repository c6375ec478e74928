"""Writes the HTTP/1.1 head of a request to a worker, and reads the head of the reply."""

from __future__ import annotations

import re

from kvkernels import reply_head
from router.http.errors import ClientError, WorkerError
from router.http.forwarding import REPLACED, ForwardedHeaders, lines_of
from router.http.reply import Framing, ReplyHead, UpstreamRequest

BODYLESS_METHODS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})
_FRAMINGS = (Framing.NONE, Framing.LENGTH, Framing.CHUNKED, Framing.CLOSE)  # by number
_TARGET = re.compile(r"/[!-~]*")
_METHOD = re.compile(r"[A-Z]{1,20}")


def parse_head(head: bytes, method: str) -> ReplyHead:
    """Parse the head of a worker's reply: the status line and the headers.

    `head` does not include the empty line at the end. Headers that only the router may send to
    clients (`x-warmroute-*`) are left out. Raises WorkerError("garbage") if two readers could
    disagree on where the reply ends: bare LF, folded lines, both a length and chunks, lengths that
    differ, or an unknown transfer coding.
    """
    try:
        status, reason, headers, framing, length, *flags = reply_head(head, method == "HEAD")
    except ValueError as error:
        raise WorkerError("garbage", str(error)) from None
    return ReplyHead(status, reason, headers, _FRAMINGS[framing], length, *flags)


def request_head(request: UpstreamRequest, host: bytes, base_path: str) -> bytes:
    """Return the head that is sent to the worker, with the empty line at its end.

    Raises ClientError(400) for a method or target that is not allowed in a request line.
    """
    if not _METHOD.fullmatch(request.method) or not _TARGET.fullmatch(request.target):
        raise ClientError(400, "the request's method or path has characters that HTTP forbids")
    headers = request.headers
    parts = [
        f"{request.method} {base_path}{request.target} HTTP/1.1\r\nHost: ".encode(),
        host,
        b"\r\n",
        headers.lines() if isinstance(headers, ForwardedHeaders) else lines_of(headers, REPLACED),
        *[b"%b: %b\r\n" % header for header in request.internal_headers],
    ]
    if request.body or request.method not in BODYLESS_METHODS:
        parts.append(b"Content-Length: %d\r\n" % len(request.body))
    parts.append(b"\r\n")
    return b"".join(parts)
