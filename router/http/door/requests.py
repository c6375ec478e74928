"""The bytes of a connection, cut into whole requests. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.http.door.head import CHUNKED, Head, RefusedError, head_of, hopeless, with_length
from router.http.errors import WorkerError
from router.http.relay.framing import ChunkedBody

_CHUNK_LINE_BYTES = 256  # size and extension
_TRAILER_BYTES = 4_096
_FREE_FRAMING_BYTES = 65_536  # of chunk lines, before they are held against what they carry
_SWALLOWED_BODIES = 8  # a refused body is read up to so many times the limit


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request, bytes. Lifetime: process."""

    head_bytes: int
    header_bytes: int  # one line of the head
    body_bytes: int


@dataclass(slots=True, unsafe_hash=True)
class Whole:
    """A request, all of it, frozen by custom. Lifetime: request."""

    head: Head
    body: bytes

    @property
    def text(self) -> bytes:
        """As the server behind may read it."""
        return self.head.text + self.body if self.body else self.head.text


class RequestReader:
    """Cuts what a client sends into whole requests. Lifetime: connection.

    What `feed` returns are requests that the server behind can frame in one way only: heads that
    keep to the grammar, bodies with their length. The first breach ends it: `refused` says why,
    and nothing is taken from then on.
    """

    __slots__ = (
        *("_limits", "_trusted", "_begun", "_head", "_body", "_left", "_chunks", "_raw_bytes"),
        *("_swallowed_bytes", "refused", "ended", "held_bytes", "requests"),
    )

    def __init__(self, limits: RequestLimits, trusted: bool) -> None:
        self._limits = limits
        self._trusted = trusted
        self._begun = b""  # of a head
        self._head: Head | None = None  # of the request whose body is arriving
        self._body = bytearray()
        self._left = 0  # bytes of the body to come, where its length is known
        self._chunks: ChunkedBody | None = None
        self._raw_bytes = 0  # of the body, with its framing
        self._swallowed_bytes = -1  # of a body that is too large; -1: it is not
        self.refused: str | None = None  # reason
        self.ended = False  # the last request of the connection was given on
        self.held_bytes = 0  # of an unfinished request
        self.requests = 0  # given on so far

    @property
    def in_head(self) -> bool:
        """A head has begun and has not ended."""
        return bool(self._begun)

    @property
    def in_body(self) -> bool:
        """A head is whole, its body is not."""
        return self._head is not None

    @property
    def wants_continue(self) -> bool:
        """The client waits for 100 Continue."""
        head = self._head
        return head is not None and head.expects and not self._raw_bytes

    def feed(self, data: bytes) -> list[Whole]:
        """The whole requests that `data` completes."""
        whole: list[Whole] = []
        if self.refused is not None or self.ended:
            return whole
        at = 0
        try:
            if self._begun:
                at, data = self._go_on(data, whole)
            while at < len(data) and not self.ended:
                if self._head is None:
                    at = self._take_head(data, at, at, whole)
                else:
                    at = self._take_body(data, at, whole)
        except RefusedError as error:
            self.stop(error.reason)
        except WorkerError:  # of the one reader of chunks, which the relay uses too
            self.stop("bad_chunk")
        self.requests += len(whole)
        return whole

    def stop(self, reason: str) -> None:
        """Take nothing from now on."""
        self.refused = reason
        self._forget()

    def _go_on(self, data: bytes, whole: list[Whole]) -> tuple[int, bytes]:
        """Go on with a head that has begun; what was looked at before is not again."""
        seen = len(self._begun)
        data = self._begun + data
        self._begun = b""
        self.held_bytes = 0
        return self._take_head(data, 0, seen, whole), data

    def _take_head(self, data: bytes, at: int, seen: int, whole: list[Whole]) -> int:
        """Take a head, and its body as far as it has come; returns where to go on.

        `seen`: up to there no head's end was found before.
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
            whole.append(Whole(head, b""))
            self.ended = head.last
            return end
        stop = end + head.length
        limit = self._limits.body_bytes
        if head.length != CHUNKED and stop <= len(data) and head.length <= limit:
            whole.append(Whole(head, data[end:stop]))
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
        come_bytes = max(len(self._body), self._swallowed_bytes)
        if self._raw_bytes > _FREE_FRAMING_BYTES + 5 * come_bytes // 4:
            raise RefusedError("tiny_chunks")
        if self._swallowed_bytes > _SWALLOWED_BODIES * self._limits.body_bytes:
            raise RefusedError("body_too_large")
        if chunks.done:
            text = with_length(self._head.text, len(self._body))
            self._end(replace(self._head, text=text), whole)
        return at + chunks.taken

    def _keep(self, piece: bytes) -> None:
        """Bytes of the body; those of one that is too large are only counted."""
        if self._swallowed_bytes < 0 and len(self._body) + len(piece) > self._limits.body_bytes:
            self._swallowed_bytes = len(self._body)
            self._body = bytearray()
        if self._swallowed_bytes >= 0:
            self._swallowed_bytes += len(piece)
        else:
            self._body += piece
        self.held_bytes = len(self._body)

    def _end(self, head: Head, whole: list[Whole]) -> None:
        """The request is whole, or was not to be taken."""
        if self._swallowed_bytes >= 0:
            raise RefusedError("body_too_large")
        self.ended = head.last
        whole.append(Whole(head, bytes(self._body)))
        self._forget()

    def _forget(self) -> None:
        self._begun = b""
        self._head = None
        self._chunks = None
        self._body = bytearray()
        self.held_bytes = 0
