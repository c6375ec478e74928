"""Defines the relay's types: the request to a worker, the receiver of its reply, and its outcome in
the end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from math import isfinite
from typing import Protocol, runtime_checkable

from kvkernels import AnswerDue
from router.http.errors import ClientError, WorkerError, WorkerErrorKind

Header = tuple[bytes, bytes]  # name and value as received, case kept

RETRYABLE_STATUSES = frozenset({429, 500, 502, 503, 504, 529})
# A worker may say with these that it has not got the model: by 404, SGLang and Triton by 400 too.
DENIAL_STATUSES = frozenset({400, 404})
_BUSY_STATUSES = frozenset({429, 529})  # 529: Anthropic's API, and Dynamo
RANK_HEADER = b"x-data-parallel-rank"  # vLLM from 0.14, SGLang
EVENT_STREAM = b"text/event-stream"


class Framing(Enum):
    """How a reply's body ends (RFC 9112, section 6.3)."""

    NONE = "none"  # no body: HEAD, 204, 304
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"  # ends where the connection ends


@dataclass(slots=True, unsafe_hash=True)
class UpstreamRequest:
    """A client's request in the form in which the router sends it to a worker. Lifetime: request.

    `headers` are the client's; hop-by-hop headers, `Host`, `Content-Length` and
    `x-warmroute-internal-*` are replaced or left out when the head is written. `target` is the path
    with the query, in ASCII, and begins with "/".
    """

    method: str
    target: str
    headers: Iterable[Header] = ()
    body: bytes = b""
    internal_headers: tuple[Header, ...] = ()  # ours, added after the client's were filtered
    mark: bytes | None = None  # once in each event that carries tokens; None: every event does
    keeps_ends: bool = False  # both ends of the answer's body are wanted (`Outcome.kept`)
    once: bool = False  # it is not sent again where a kept connection turns out to be closed
    due: AnswerDue | None = None  # the form that its answer must have; None: any form
    # After this many seconds without bytes from the worker the client gets a comment, if Python
    # relays and the sink is a `PingedSink`; 0: none.
    ping_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of each step of one request, in seconds."""

    connect_s: float = 5.0
    send_s: float = 30.0  # for a worker to take more of the request's body
    first_byte_s: float = 600.0  # from sending the request to the first byte of the reply's body
    between_s: float = 120.0  # between two reads of the reply's body
    client_s: float = 120.0  # for a client to read while its buffer is full


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """The limits for the exchanges with one worker. Lifetime: process."""

    max_connections: int = 4096  # open to one worker at once, idle ones included
    idle_s: float = 30.0  # an idle connection older than this is closed, not used
    header_bytes: int = 65_536  # of a reply's head, 1xx heads before it included
    chunk_line_bytes: int = 4_096  # of a chunk's size line, extensions included
    # Of a reply's body kept for the case that no other worker does better: of a 5xx reply, and of
    # one of status 200 until it is an answer.
    held_bytes: int = 65_536
    # To wait for the rest of such a body before going elsewhere; and as long a line that keeps the
    # client's connection open waits for the answer to begin.
    held_s: float = 1.0
    tail_bytes: int = 8_192  # of a body's end kept to find the usage in
    write_bytes: int = 262_144  # of a request's body written before waiting for the worker
    progress_s: float = 0.05  # least time between two calls of `on_progress`

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(slots=True, unsafe_hash=True)
class Terms:
    """The limits of one exchange with a worker, and the functions that are called during it.
    Lifetime: request.
    """

    limits: RelayLimits
    timeouts: Timeouts
    clock: Callable[[], float]
    on_first_byte: Callable[[float], None] | None = None  # of an answer; a 4xx is none
    on_progress: Callable[[float, int], None] | None = None
    mark: bytes | None = None  # these three as of `UpstreamRequest`
    keeps_ends: bool = False
    due: AnswerDue | None = None
    ping_s: float = 0.0


@dataclass(slots=True, unsafe_hash=True)
class ReplyHead:
    """The status and headers of a worker's reply; `headers` include the hop-by-hop headers."""

    status: int
    reason: bytes
    headers: tuple[Header, ...]
    framing: Framing
    length: int = 0  # bytes of the body where framing is LENGTH
    reusable: bool = True  # the worker keeps the connection open after this reply
    event_stream: bool = False
    coded: bool = False  # the body is compressed, or otherwise encoded

    @property
    def answers(self) -> bool:
        """True if the reply is a model's answer, and False if it is a refusal."""
        return 200 <= self.status < 300

    @property
    def kind(self) -> WorkerErrorKind:
        """The kind of worker error that the reply's status means, for a status after which another
        worker is tried.

        It is "busy" if the worker has more requests than it can take now: the status says so (RFC
        6585, section 4), or it is 503 with the time of a retry (RFC 9110, sections 10.2.3 and
        15.6.4).
        """
        busy = self.status in _BUSY_STATUSES or (
            self.status == 503 and any(n.lower() in _TIMES for n, _ in self.headers)
        )
        return "busy" if busy else "status_5xx"

    @property
    def error(self) -> WorkerError:
        """The worker error that the reply's status means, with the requested pause."""
        kind = self.kind
        said = f"the worker answered with status {self.status}"
        return WorkerError(kind, said, retry_after_s(self.headers) if kind == "busy" else None)


_TIMES = frozenset({b"retry-after", b"retry-after-ms"})


def retry_after_s(headers: tuple[Header, ...]) -> float:
    """Return for how many seconds a worker asks to get no requests; 0 if its reply names no time.

    The time is in `Retry-After`, as a number or a date (RFC 9110, section 10.2.3), or in
    `retry-after-ms`, as in OpenAI's API.
    """
    told = {name.lower(): value.strip().decode("latin-1") for name, value in headers}
    for name, unit_s in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        with suppress(ValueError):
            seconds = float(told.get(name, "")) * unit_s
            if isfinite(seconds):
                return max(seconds, 0.0)
    until_s = _unix_s(told.get(b"retry-after", ""))
    now_s = _unix_s(told.get(b"date", ""))
    if until_s is None:
        return 0.0
    return max(until_s - (time.time() if now_s is None else now_s), 0.0)


def _unix_s(date: str) -> float | None:
    """Return an HTTP date as Unix time in seconds; None if the date is invalid."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


class ReplySink(Protocol):
    """The receiver of a worker's reply: it gets `head`, then `data` any number of times, then once
    `finish` or `abort`.

    None of these is called if the worker fails before the first byte of its body.
    """

    @property
    def dechunk(self) -> bool:
        """True if the client cannot read chunked bodies (HTTP/1.0), so that `data` must get bytes
        without chunk framing.
        """

    @property
    def movable(self) -> bool:
        """True if another worker can continue the reply even after the client has received a part
        of it.
        """

    @property
    def congested(self) -> bool:
        """True if the client reads more slowly than the worker writes; the relay must await `drain`
        before more `data`.
        """

    def head(self, head: ReplyHead) -> None:
        """Begin the reply with its status and headers. `data` or `finish` follows in the same turn
        of the event loop.
        """

    def data(self, data: bytes) -> None:
        """Take bytes of the body, which include chunk framing unless `dechunk` is True."""

    async def drain(self) -> None:
        """Wait until the client has read the bytes that were written."""

    def finish(self) -> None:
        """End the reply, all of which has been written."""

    def abort(self, late: bool = False) -> None:
        """Break the reply off by closing the client's connection, so that it cannot look complete.
        `late` True means that the request's deadline passed; otherwise the worker is at fault.
        """


class PassingSink(ABC):
    """A `ReplySink` that calls the same method of another sink, except where a subclass overrides
    it.
    """

    @property
    @abstractmethod
    def _reply(self) -> ReplySink:
        """Return the sink that gets the calls; it may be another one at each call."""

    @property
    def dechunk(self) -> bool:
        return self._reply.dechunk

    @property
    def movable(self) -> bool:
        return self._reply.movable

    @property
    def congested(self) -> bool:
        return self._reply.congested

    def head(self, head: ReplyHead) -> None:
        self._reply.head(head)

    def data(self, data: bytes) -> None:
        self._reply.data(data)

    async def drain(self) -> None:
        await self._reply.drain()

    def finish(self) -> None:
        self._reply.finish()

    def abort(self, late: bool = False) -> None:
        self._reply.abort(late)


PING = b": waiting for a worker\n\n"  # a comment, which readers of events pass over


@runtime_checkable
class PingedSink(Protocol):
    """A `ReplySink` that can send the client a comment before the reply begins."""

    def ping(self) -> None:
        """Write a comment to the client. `dechunk` may become True by it."""


@dataclass(frozen=True, slots=True)
class HeldReply:
    """A worker's refusal or failure that is kept and not sent yet, because another worker may still
    answer.
    """

    head: ReplyHead
    body: bytes

    def deliver(self, sink: ReplySink) -> None:
        """Send the kept answer to the client, with the length of its body."""
        headers = tuple(
            (name, value)
            for name, value in self.head.headers
            if name.lower() not in (b"content-length", b"transfer-encoding", b"trailer")
        )
        framing = Framing.NONE
        if self.head.framing is not Framing.NONE:
            headers += ((b"Content-Length", b"%d" % len(self.body)),)
            framing = Framing.LENGTH
        sink.head(ReplyHead(self.head.status, self.head.reason, headers, framing, len(self.body)))
        if self.body:
            sink.data(self.body)
        sink.finish()


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """The token counts of a request as the worker reported them; a count that it did not report is
    None.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class Outcome:
    """The end of one request at one worker: an error or a complete reply. Times are seconds on the
    router's clock.

    The class of `error` says whose fault it was; None means that the whole reply, even a 4xx,
    reached the client's buffer or is `held`. `events` counts the `data:` lines of an event stream
    including the closing `[DONE]`, or the request's `mark`s; it is 0 for other replies.
    """

    started_s: float
    status: int | None = None  # None: no reply's head came
    error: WorkerError | ClientError | None = None
    bytes_to_client: int = 0  # of the reply's body, as handed to the sink
    first_byte_s: float | None = None  # first byte of the reply's body; of an answer its content
    last_byte_s: float | None = None
    events: int = 0
    usage: Usage | None = None
    # The failure's reply, if it arrived whole and within the limits; without an `error` a reply of
    # `DENIAL_STATUSES`, which the sender of the request examines and delivers.
    held: HeldReply | None = None
    resumable: bool = False  # the client saw a part, and another worker can give it the rest
    first_token_s: float | None = None  # the first `mark`, in an event stream that has marks
    fallback_reason: str = ""  # why Python relayed it, docs/reference/server.md; "": the thread did
    # Of its body, where that is wanted: all of it, or where it is long its beginning, a zero byte
    # and its end; of an event stream its end; of tensors as bytes all of it, or nothing.
    kept: bytes = b""
    # The client has all of the reply, or another answer: whose worker failed is only counted.
    final: bool = False
    stale: bool = False  # a kept connection had been closed, and it was to be sent once
    refused: bool = False  # status 200 with an error that the client caused

    @property
    def answers(self) -> bool:
        """True if the reply is a model's answer or the beginning of one, and False if it is a
        refusal.
        """
        return self.status is not None and 200 <= self.status < 300 and not self.refused

    @property
    def retryable(self) -> bool:
        """True if another worker may be tried: this worker is at fault, and the client has received
        nothing, or only a part that another worker can continue.
        """
        seen = self.bytes_to_client > 0 and not self.resumable
        return isinstance(self.error, WorkerError) and not seen and not self.final


class Sends(Protocol):
    """Sends requests to one worker. Lifetime: worker."""

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Send a request to the worker and relay its reply, as `router.upstream.fallback.Upstream`
        does.
        """

    def abandon_silent(self) -> None:
        """Abandon every exchange whose client has received nothing yet."""

    async def aclose(self) -> None:
        """End all exchanges with the worker."""
