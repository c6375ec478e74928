"""Parses HTTP/1.1 requests from a connection's bytes without I/O, so that each byte sequence has
only one reading.

The grammar is RFC 9112 without its tolerance for old senders: it allows no bare LF, no folded
lines, no blank before a colon, no control characters, and only one length or one coding. Usual
heads are parsed natively (`kvkernels.plain_head`); this module decides which heads are usual, and
parses all others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvkernels import PlainHead, plain_head
from router.http.bodies import ChunkedBody
from router.http.errors import WorkerError
from router.http.forwarding import lines_of

CHUNKED = -1  # as a length: the body says itself where it ends
MAX_HEADERS = 128
_CHUNK_LINE_BYTES = 256  # size and extension
_TRAILER_BYTES = 4_096
_FREE_FRAMING_BYTES = 65_536  # of chunk lines, before they are held against what they carry
_PIECE_BYTES = 1 << 20  # of a body: copied as a whole, 16 MB would stop the event loop
_SWALLOWED_BODIES = 8  # a refused body is read up to so many times the limit

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
# A host and a port (RFC 9110, 4.2).
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
_ALONE = (  # names that may occur in a head once
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
    """Raised for a request that is refused; `reason` is one of `messages.REFUSALS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fields:
    """The headers of a request, parsed in Python; the same interface as `kvkernels.PlainHead`.
    Lifetime: request.
    """

    __slots__ = ("_fields",)

    def __init__(self, text: bytes) -> None:
        """Parse the header lines in `text`, a head that is known to follow the grammar."""
        lines = (line.partition(b":") for line in text[:-4].split(b"\r\n")[1:])
        self._fields = tuple((name, value.strip(b" \t")) for name, _, value in lines)

    def get(self, name: str) -> str | None:
        """Return the first value of a header, or None; `name` may have any letter case."""
        wanted = name.lower().encode()
        for known, value in self._fields:
            if known.lower() == wanted:
                return value.decode("utf-8", "surrogateescape")
        return None

    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return all headers in order."""
        return self._fields

    def among(self, names: frozenset[str]) -> dict[str, str] | None:
        """Return the values of those headers whose lower-case names are in `names`, by lower-case
        name; None if there are none. If a header occurs twice, its first value counts.
        """
        found: dict[str, str] = {}
        for known, value in self._fields:
            if (name := known.lower().decode("latin-1")) in names:
                found.setdefault(name, value.decode("utf-8", "surrogateescape"))
        return found or None

    def lines(self, skip: frozenset[bytes]) -> bytes:
        """Return the headers to send to a worker as lines that end with CRLF, without those whose
        lower-case names are in `skip`.
        """
        return lines_of(self._fields, skip)


@dataclass(slots=True, unsafe_hash=True)
class Head:
    """The parsed head of a request; it is immutable. Lifetime: request."""

    text: bytes  # without headers that are not for the router, with its empty line
    length: int  # of the body, bytes; CHUNKED: not given
    method: str
    target: str
    headers: PlainHead | Fields
    last: bool  # the connection ends after it
    expects: bool = False  # the client waits for 100 Continue before it sends the body
    http_1_0: bool = False


def head_of(text: bytes, trusted: bool) -> Head:
    """Parse a request's head in native code if possible, otherwise with `read_head`."""
    found = plain_head(text)
    if found is None:
        return read_head(text, trusted)
    headers, method, target, length, last = found
    return Head(text, length, method, target, headers, last)


def read_head(text: bytes, trusted: bool) -> Head:
    """Parse a request's head, which includes its empty line. `trusted` True means that the sender
    may set headers that only routers send to engines. Raises RefusedError.
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
    if names <= _PLAIN:
        expects = False
    else:
        text, length, expects = _closely(text, length, lower, version, trusted)
    target = line[2].decode()
    return Head(text, length, method.decode(), target, Fields(text), last, expects, version == b"0")


def _repeated(names: list[bytes]) -> str:
    if names.count(b"content-length") > 1:
        return "bad_length"
    return "bad_host" if names.count(b"host") > 1 else "repeated_header"


def _closely(
    text: bytes, length: int, lower: bytes, version: bytes, trusted: bool
) -> tuple[bytes, int, bool]:
    """Parse a head that has headers which the router reads or removes. Return the remaining text,
    the body's length in bytes, and whether the client waits for 100 Continue.
    """
    names = _NAME.findall(lower)
    first, *lines = text[:-4].split(b"\r\n")
    kept, expects = [first], False
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
    return b"\r\n".join(kept) + b"\r\n\r\n", length, expects


def _check_coding(value: bytes, names: list[bytes], version: bytes) -> None:
    if b"content-length" in names:
        raise RefusedError("two_framings")
    if value.lower() != b"chunked" or version == b"0":
        raise RefusedError("bad_coding")


def _connection(value: bytes) -> bytes:
    """Return the value of a Connection header without `upgrade`, because the router never switches
    to another protocol.
    """
    if not _CONNECTION.fullmatch(value):
        raise RefusedError("bad_connection")
    options = [option.strip() for option in value.split(b",")]
    return b", ".join(o for o in options if o and o.lower() not in _NOT_FOR_US)


def _private(folded: bytes, value: bytes) -> bool:
    if folded.startswith(PRIVATE):
        return True
    return folded == b"x-request-id" and _ADDRESSES.search(value.lower()) is not None


def with_length(head: Head, length: int) -> Head:
    """Return a copy of a chunked request's head that has a `Content-Length` instead."""
    text = head.text[:-2] + b"Content-Length: %d\r\n\r\n" % length
    return replace(head, text=text, length=length, headers=Fields(text))


def why_not(text: bytes) -> str:
    """Return the reason why a head, or the beginning of a head, is refused."""
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
    """Return why bytes that begin a head can never become a valid head; None if they still can.

    This ends the wait for bytes of another protocol, or for lines without CR. The first `seen`
    bytes were checked before.
    """
    newline = begun.find(b"\n", max(seen - 1, 0))
    if newline < 0 and not _FIRST_BYTES.match(begun):
        return "bad_request_line"
    if _BARE.search(begun, max(seen - 1, 0)):
        return "bad_line_end"
    if newline >= 0 and begun.find(b"\n", 0, newline) < 0 and _REQUEST_LINE.match(begun) is None:
        return why_not(begun[: newline + 1])
    return None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request in bytes. Lifetime: process."""

    head_bytes: int
    header_bytes: int  # one line of the head
    body_bytes: int


@dataclass(slots=True, unsafe_hash=True)
class Whole:
    """A complete request, head and body; it is immutable. Lifetime: request."""

    head: Head
    pieces: tuple[bytes, ...]  # of the body; more than one where to join them takes milliseconds

    @property
    def body(self) -> bytes:
        """The body as one bytes object, joined from its pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class RequestReader:
    """Splits the bytes that a client sends into complete requests. Lifetime: connection.

    `feed` returns only requests whose end is unambiguous: heads that follow the grammar, and bodies
    of a known length. After the first violation, `refused` has the reason, and all further bytes
    are ignored.
    """

    __slots__ = (
        *("_limits", "_trusted", "_begun", "_head", "_pieces", "_body", "_left", "_chunks"),
        *("_raw_bytes", "_swallowed_bytes", "refused", "ended", "held_bytes", "requests"),
    )

    def __init__(self, limits: RequestLimits, trusted: bool) -> None:
        self._limits = limits
        self._trusted = trusted
        self._begun = b""  # of a head
        self._head: Head | None = None  # of the request whose body is arriving
        self._pieces: list[bytes] = []  # of its body, but for the last
        self._body = bytearray()  # the last one
        self._left = 0  # missing bytes of the body, if its length is known
        self._chunks: ChunkedBody | None = None
        self._raw_bytes = 0  # of the body, with its framing
        self._swallowed_bytes = -1  # of a body that is too large; -1: it is not
        self.refused: str | None = None  # reason
        self.ended = False  # the last request of the connection was given on
        self.held_bytes = 0  # of an unfinished request
        self.requests = 0  # given on so far

    @property
    def in_head(self) -> bool:
        """True if a part of a request's head has arrived, and its end has not."""
        return bool(self._begun)

    @property
    def in_body(self) -> bool:
        """True if a request's head has arrived, and the end of its body has not."""
        return self._head is not None

    @property
    def wants_continue(self) -> bool:
        """True if the client waits for 100 Continue."""
        head = self._head
        return head is not None and head.expects and not self._raw_bytes

    def feed(self, data: bytes) -> list[Whole]:
        """Read the client's next bytes, `data`, and return the requests that they complete."""
        whole: list[Whole] = []
        if self.refused is not None or self.ended:
            return whole
        at = 0
        try:
            if self._begun:
                at, data = self._continue_head(data, whole)
            while at < len(data) and not self.ended:
                if self._head is None:
                    at = self._take_head(data, at, at, whole)
                else:
                    at = self._take_body(data, at, whole)
        except RefusedError as error:
            self.stop(error.reason)
        except WorkerError:  # of the one reader of chunks, which the relay uses, too
            self.stop("bad_chunk")
        self.requests += len(whole)
        return whole

    def stop(self, reason: str) -> None:
        """Ignore all further bytes from the client, for this `reason`."""
        self.refused = reason
        self._forget()

    def _continue_head(self, data: bytes, whole: list[Whole]) -> tuple[int, bytes]:
        """Continue a head that has begun with more bytes, without searching the earlier bytes
        again.
        """
        seen = len(self._begun)
        data = self._begun + data
        self._begun = b""
        self.held_bytes = 0
        return self._take_head(data, 0, seen, whole), data

    def _take_head(self, data: bytes, at: int, seen: int, whole: list[Whole]) -> int:
        """Parse a head in `data`, and take its body as far as it has arrived; return the position
        after them.

        No head ends before the position `seen`.
        """
        while data.startswith(b"\r\n", at):  # RFC 9112, 2.2: empty lines before a request
            at += 2
        end = data.find(b"\r\n\r\n", max(at, seen - 3), at + self._limits.head_bytes)
        if end < 0:
            return self._begin(data[at:] if at else data, max(seen - at, 0), len(data))
        end += 4
        head = head_of(data[at:end], self._trusted)
        most = self._limits.header_bytes
        if len(head.text) > most and max(map(len, head.text.split(b"\r\n"))) > most:
            raise RefusedError("head_too_large")
        if head.length == 0:
            whole.append(Whole(head, (b"",)))
            self.ended = head.last
            return end
        stop = end + head.length
        limit = self._limits.body_bytes
        if head.length != CHUNKED and stop <= len(data) and head.length <= limit:
            whole.append(Whole(head, (data[end:stop],)))
            self.ended = head.last
            return stop
        self._head = head
        self._left = head.length
        self._raw_bytes = 0
        self._swallowed_bytes = 0 if head.length > limit else -1
        if head.length > limit and (head.expects or head.length > _SWALLOWED_BODIES * limit):
            raise RefusedError("body_too_large")
        if head.length == CHUNKED:
            self._chunks = ChunkedBody(_CHUNK_LINE_BYTES, _TRAILER_BYTES)
        return end

    def _begin(self, begun: bytes, seen: int, stop: int) -> int:
        if not begun:  # empty lines alone
            return stop
        reason = hopeless(begun, seen)
        if reason is None and len(begun) >= self._limits.head_bytes:
            reason = "head_too_large"
        if reason is not None:
            raise RefusedError(reason)
        self._begun = begun
        self.held_bytes = len(begun)
        return stop

    def _take_body(self, data: bytes, at: int, whole: list[Whole]) -> int:
        assert self._head is not None
        if self._chunks is not None:
            return self._take_chunks(self._chunks, data, at, whole)
        stop = min(len(data), at + self._left)
        self._left -= stop - at
        self._raw_bytes += stop - at
        self._keep(data[at:stop])
        if not self._left:
            self._end(self._head, whole)
        return stop

    def _take_chunks(self, chunks: ChunkedBody, data: bytes, at: int, whole: list[Whole]) -> int:
        assert self._head is not None
        self._keep(chunks.feed(data[at:] if at else data))
        self._raw_bytes += chunks.taken
        come_bytes = max(self.held_bytes, self._swallowed_bytes)
        if self._raw_bytes > _FREE_FRAMING_BYTES + 5 * come_bytes // 4:
            raise RefusedError("tiny_chunks")
        if self._swallowed_bytes > _SWALLOWED_BODIES * self._limits.body_bytes:
            raise RefusedError("body_too_large")
        if chunks.done:
            self._end(with_length(self._head, self.held_bytes), whole)
        return at + chunks.taken

    def _keep(self, piece: bytes) -> None:
        """Store bytes of the body. If the body is larger than allowed, only count them."""
        if self._swallowed_bytes < 0 and self.held_bytes + len(piece) > self._limits.body_bytes:
            self._swallowed_bytes = self.held_bytes
            self._forget_body()
        if self._swallowed_bytes >= 0:
            self._swallowed_bytes += len(piece)
            return
        self._body += piece
        self.held_bytes += len(piece)
        if len(self._body) >= _PIECE_BYTES:
            self._pieces.append(bytes(self._body))
            self._body.clear()

    def _end(self, head: Head, whole: list[Whole]) -> None:
        """Append the completed request to `whole`, or raise the refusal of a body that is too
        large.
        """
        if self._swallowed_bytes >= 0:
            raise RefusedError("body_too_large")
        self.ended = head.last
        if self._body or not self._pieces:
            self._pieces.append(bytes(self._body))
        whole.append(Whole(head, tuple(self._pieces)))
        self._forget()

    def _forget(self) -> None:
        self._begun = b""
        self._head = None
        self._chunks = None
        self._forget_body()

    def _forget_body(self) -> None:
        self._pieces = []
        self._body = bytearray()
        self.held_bytes = 0
