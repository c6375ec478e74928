"""A request's head, read in one way only. No I/O.

The grammar is that of RFC 9112 without what it tolerates for old senders: no bare LF, no folded
lines, no blank before a colon, no control characters, one length or one coding. What passes can be
framed in one way only by whoever reads it next. Heads that go on as they came are read natively
(`kvkernels.plain_head`); which these are, and what becomes of all others, is said here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvkernels import PlainHead, plain_head

CHUNKED = -1  # as a length: the body says itself where it ends
MAX_HEADERS = 128

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
# A host and a port (RFC 9110, 4.2) as the server behind takes them: it would answer others itself.
_PORT = rb":(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST = rb"(?:[A-Za-z0-9._~!$&'()*+,;=-]++|\[[0-9A-Fa-f:.]{2,45}\])(?:" + _PORT + rb")?"
_TARGET = rb"(?:https?://" + _HOST + rb")?/[^\x00-\x20#\x7f-\xff]*+"
_LINE = rb"([A-Z]{1,20}) (" + _TARGET + rb") HTTP/1\.([01])\r\n"
_FIELD = _TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*+\r\n"
_REQUEST_LINE = re.compile(_LINE)
_HEAD = re.compile(_LINE + rb"(?:" + _FIELD + rb"){0,%d}+\r\n" % MAX_HEADERS)
_NAME = re.compile(rb"\n([^:\r]+):")
_FIRST_BYTES = re.compile(rb"\r\Z|[A-Z]{1,20}(?: |\Z)")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*+([0-9]{1,15})[ \t]*+\r")
_METHODS = frozenset((b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"PATCH", b"DELETE"))

# Written by routers and sidecars to engines, never by clients; a dash at the end is a prefix.
# From: vLLM 0.14, SGLang 0.5 (`x-data-parallel-rank`, `x-override-*`), llm-d 0.3 (`x-prefiller-*`,
# `x-encoder-*`, `x-kv-cache-source-*`), Gateway API inference extension 1.0 (`x-gateway-*`).
PRIVATE = (
    b"x-warmroute-internal-",
    b"x-data-parallel-",
    b"x-prefiller-",
    b"x-encoder-hosts-",
    b"x-kv-cache-source-",
    b"x-override-",
    b"x-gateway-destination-",
)
# Addresses of engines in a request's id, as vLLM's P2pNcclConnector (0.9 to 0.22) reads them.
_ADDRESSES = re.compile(rb"___(?:prefill|decode)_addr_")
_ALONE = (  # may stand in a head once
    *(b"host", b"content-length", b"content-type", b"user-agent", b"authorization", b"etag"),
    *(b"content-location", b"content-range", b"max-forwards", b"server", b"expect"),
)
_PLAIN = frozenset(_ALONE) - {b"expect"} | {b"connection"}
_ONCE = frozenset((*_ALONE, b"transfer-encoding"))
# Names in small letters that matter here. Of those not in _PLAIN, a closer look is taken.
_NOTED = re.compile(
    rb"\n((?:"
    + b"|".join(_ALONE)
    + rb"|transfer[-_]encoding|content_length|upgrade|http2-settings)(?=:)"
    + rb"|connection(?=:[ \t]*(?:keep-alive|close)[ \t]*\r)|connection:|x[-_](?:"
    + b"|".join(name[2:].replace(b"-", b"[-_]") for name in PRIVATE)
    + rb"|request-id(?=:[^\r]*___)))"
)
_LOOKALIKES = frozenset((b"content-length", b"transfer-encoding"))
_NOT_FOR_US = frozenset((b"upgrade", b"http2-settings", b"expect"))
_CLOSE = re.compile(rb"\nconnection:(?:[^\r]*,)?[ \t]*close[ \t]*[,\r]")
_KEEP_ALIVE = re.compile(rb"\nconnection:(?:[^\r]*,)?[ \t]*keep-alive[ \t]*[,\r]")
_CONNECTION = re.compile(rb"(?:" + _TOKEN + rb"|[ \t,])*+")


class RefusedError(Exception):
    """A request that is not taken; `reason` is one of `refusals.REFUSALS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, unsafe_hash=True)
class Head:
    """A head that may go on, frozen by custom. Lifetime: request."""

    text: bytes  # as the server behind may read it, its empty line included
    length: int  # of the body, bytes; CHUNKED: not told
    expects: bool = False  # the client waits for 100 Continue before it sends the body
    rewritten: bool = False  # `text` is not what the client wrote
    last: bool = False  # the connection ends after it
    plain: PlainHead | None = None  # as it was read natively
    method: str = ""  # of plain ones, as is the target
    target: str = ""


def head_of(text: bytes, trusted: bool) -> Head:
    """As `read_head`, natively where that can be."""
    found = plain_head(text)
    if found is None:
        return read_head(text, trusted)
    plain, method, target, length, last = found
    return Head(text, length, False, False, last, plain, method, target)


def read_head(text: bytes, trusted: bool) -> Head:
    """Read a head with its empty line. `trusted`: may say what only routers say to engines.

    Raises RefusedError.
    """
    line = _HEAD.fullmatch(text)
    if line is None:
        raise RefusedError(why_not(text))
    method, version = line[1], line[3]
    if method not in _METHODS:
        raise RefusedError("bad_method")
    lower = text.lower()
    noted = _NOTED.findall(lower)
    names = set(noted)
    if len(names) != len(noted) and any(noted.count(name) > 1 for name in _ONCE):
        raise RefusedError(_repeated(noted))
    if b"host" not in names and version == b"1":
        raise RefusedError("bad_host")
    length = 0
    if b"content-length" in names:
        found = _LENGTH.search(lower)
        if found is None:
            raise RefusedError("bad_length")
        length = int(found[1])
    last = version == b"0" or b"connection" in names or b"connection:" in names
    if last:
        last = _CLOSE.search(lower) is not None
        last = last or (version == b"0" and _KEEP_ALIVE.search(lower) is None)
    head = Head(text, length, last=last)
    return head if names <= _PLAIN else _closely(head, lower, version, trusted)


def _repeated(names: list[bytes]) -> str:
    if names.count(b"content-length") > 1:
        return "bad_length"
    return "bad_host" if names.count(b"host") > 1 else "repeated_header"


def _closely(head: Head, lower: bytes, version: bytes, trusted: bool) -> Head:
    """The same for a head with headers that are ours to read, or to leave out."""
    names = _NAME.findall(lower)
    first, *lines = head.text[:-4].split(b"\r\n")
    kept, length, expects = [first], head.length, False
    for name, line in zip(names, lines, strict=True):
        value = line[len(name) + 1 :].strip(b" \t")
        folded = name.replace(b"_", b"-")
        if folded in _LOOKALIKES and folded != name:
            raise RefusedError("lookalike_header")
        if name == b"transfer-encoding":
            _check_coding(value, names, version)
            length = CHUNKED
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise RefusedError("bad_expectation")
            expects = version == b"1"
        elif name == b"connection":
            kept.append(b"Connection: " + _connection(value))
        elif name not in _NOT_FOR_US and (trusted or not _private(folded, value)):
            kept.append(line)
    return Head(b"\r\n".join(kept) + b"\r\n\r\n", length, expects, True, head.last)


def _check_coding(value: bytes, names: list[bytes], version: bytes) -> None:
    if b"content-length" in names:
        raise RefusedError("two_framings")
    if value.lower() != b"chunked" or version == b"0":
        raise RefusedError("bad_coding")


def _connection(value: bytes) -> bytes:
    """What Connection names, without a switch to another protocol, which is never made here."""
    if not _CONNECTION.fullmatch(value):
        raise RefusedError("bad_connection")
    options = [option.strip() for option in value.split(b",")]
    return b", ".join(o for o in options if o and o.lower() not in _NOT_FOR_US)


def _private(folded: bytes, value: bytes) -> bool:
    if folded.startswith(PRIVATE):
        return True
    return folded == b"x-request-id" and _ADDRESSES.search(value.lower()) is not None


def with_length(head: bytes, length: int) -> bytes:
    """A head whose body came in chunks, as if its length had been told."""
    return head[:-2] + b"Content-Length: %d\r\n\r\n" % length


def why_not(text: bytes) -> str:
    """The reason for which a head, or its beginning, is refused."""
    if _BARE.search(text):
        return "bad_line_end"
    first, _, rest = text.partition(b"\r\n")
    if _REQUEST_LINE.fullmatch(first + b"\r\n") is None:
        if re.fullmatch(rb"[A-Z]+ \S+ HTTP/(?!1\.[01]\Z)[0-9.]+", first):
            return "bad_version"
        if first.startswith(b"CONNECT "):
            return "bad_method"
        return "bad_request_line"
    if re.search(rb"(?:\A|\r\n)[ \t]", rest):
        return "folded_header"
    if rest.count(b"\r\n") > MAX_HEADERS + 1:
        return "head_too_large"
    return "bad_header"


def hopeless(begun: bytes, seen: int = 0) -> str | None:
    """Why the beginning of a head cannot become one; None while it still may.

    Spares the wait for the end of what is no HTTP: another protocol, or lines without CR. `seen`:
    so many bytes were looked at before.
    """
    newline = begun.find(b"\n", max(seen - 1, 0))
    if newline < 0 and not _FIRST_BYTES.match(begun):
        return "bad_request_line"
    if _BARE.search(begun, max(seen - 1, 0)):
        return "bad_line_end"
    if newline >= 0 and begun.find(b"\n", 0, newline) < 0 and _REQUEST_LINE.match(begun) is None:
        return why_not(begun[: newline + 1])
    return None
