"""One request and its reply on one connection: read, relayed, timed and judged."""

from __future__ import annotations

import asyncio

from router.http.errors import ClientError, WorkerError
from router.http.relay.connection import Connection
from router.http.relay.deadline import Deadline
from router.http.relay.framing import Body, follow
from router.http.relay.head import parse_head
from router.http.relay.meter import Meter
from router.http.relay.reply import (
    RETRYABLE_STATUSES,
    Framing,
    HeldReply,
    Outcome,
    ReplyHead,
    ReplySink,
    Terms,
)
from router.http.relay.sending import Sending

_VERSION = b"HTTP/1."


class Exchange:
    """Follows one reply from its head to its end. Lifetime: request.

    The reply's head goes to the sink together with the first byte of its body: until then the
    client has seen nothing and another worker can take over, also from one that dies in prefill.
    """

    def __init__(self, connection: Connection, method: str, sink: ReplySink, terms: Terms) -> None:
        self.ended = False
        self.reusable = False  # the connection may carry another exchange
        self.received_bytes = 0
        self._connection = connection
        self._method = method
        self._sink = sink
        self._dechunk = sink.dechunk
        self._terms = terms
        self._waker: asyncio.Future[None] | None = None
        self._bug: Exception | None = None
        self._paused = False
        self._sending = Sending(connection, terms.limits.write_bytes)
        self._buffer = b""  # of the head, until it is complete
        self._heads_bytes = 0
        self._head: ReplyHead | None = None
        self._body: Body
        self._meter: Meter
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._held_reply: HeldReply | None = None
        self._error: WorkerError | ClientError | None = None
        self._bytes_to_client = 0
        self._first_byte_s: float | None = None
        self._first_token_s: float | None = None
        self._last_byte_s: float | None = None
        self._told_s = float("-inf")
        self._told_events = 0
        self._started_s = terms.clock()
        self._deadline = Deadline(terms.clock)

    async def run(self, head: bytes, body: bytes) -> Outcome:
        """Send the request and relay the reply; cancel to give up.

        Raises nothing of the worker's or the client's: their faults are in the outcome.
        """
        try:
            self._connection.begin(self)
            if not self.ended:
                self._sending.begin(head, body)
                self._expect_more()
            while not self.ended:
                if self._paused:
                    await self._drain_client()
                elif self._sending.can_go_on:
                    self._sending.go_on()
                    if self._head is None:
                        self._expect_more()
                else:
                    self._waker = asyncio.get_running_loop().create_future()
                    await self._waker
        finally:
            self._deadline.stop()
        broken = self._error is not None or self._bug is not None
        if broken and self._bytes_to_client:
            # Last of all: the client's end cancels the very task that runs this.
            self._sink.abort()
        if self._bug is not None:
            raise self._bug
        return self._outcome()

    def _expect_more(self) -> None:
        """Bound the next step of a worker that has not begun its reply."""
        timeouts = self._terms.timeouts
        late_s = timeouts.first_byte_s if self._sending.done else timeouts.send_s
        self._deadline.start(late_s, self._on_late)

    async def _drain_client(self) -> None:
        """Wait until the client has read what it was sent, then read from the worker again."""
        try:
            async with asyncio.timeout(self._terms.timeouts.client_s):
                await self._sink.drain()
        except TimeoutError:
            self._end(ClientError(408, "the client stopped reading its reply", code="slow_client"))
        except ConnectionError:
            self._end(ClientError(499, "the client closed its connection", code="client_closed"))
        if not self.ended:
            self._paused = False
            self._deadline.start(self._terms.timeouts.between_s, self._on_late)
            self._connection.resume()

    # What the connection calls.

    @property
    def silent(self) -> bool:
        """The client has seen nothing of the reply, or nothing that needs this worker."""
        return self._first_byte_s is None or self._sink.movable

    def feed(self, data: bytes) -> None:
        """Bytes of the reply came."""
        if self.ended:
            self.reusable = False  # bytes after the end: nobody knows what they answer
            return
        self.received_bytes += len(data)
        try:
            if self._head is None:
                data = self._read_heads(data)
                if self._head is None or (not data and not self._body.done):
                    return
            self._read_body(data)
        except WorkerError as error:
            self._end(error)

    def lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        if self.ended:
            self.reusable = False
        elif exc is not None and not isinstance(exc, OSError):
            # An exception in our own callbacks ends the connection too; it is not the worker's.
            self._bug = exc
            self.ended = True
            self._wake()
        elif exc is None and self._head is not None and self._head.framing is Framing.CLOSE:
            self._end(None)
        else:
            where = "in the middle of" if self._head is not None else "before"
            self._end(WorkerError("early_close", f"the worker hung up {where} its reply"))

    def writable(self) -> None:
        """More of the request can be written."""
        self._wake()

    # The reply.

    def _read_heads(self, data: bytes) -> bytes:
        """Take the reply's head, and any 1xx before it; returns what follows it."""
        limit = self._terms.limits.header_bytes
        searched = max(0, len(self._buffer) - 3)
        data = self._buffer + data
        while self._head is None:
            stop = data.find(b"\r\n\r\n", searched)
            if self._heads_bytes + (stop if stop >= 0 else len(data)) > limit:
                raise WorkerError("garbage", f"the worker's reply has a head above {limit} bytes")
            if data[: len(_VERSION)] != _VERSION[: len(data)]:
                raise WorkerError("garbage", "the worker's reply does not begin as HTTP/1.x does")
            if stop < 0:
                self._buffer = data
                return b""
            head = parse_head(data[: stop + 2], self._method)
            self._heads_bytes += stop + 4
            data = data[stop + 4 :]
            searched = 0
            if head.status >= 200:
                self._begin_body(head)
        self._buffer = b""
        return data

    def _begin_body(self, head: ReplyHead) -> None:
        limits = self._terms.limits
        self._head = head
        self._body = follow(head, limits)
        self._meter = Meter(head.event_stream, limits.tail_bytes, self._terms.mark)
        if head.status in RETRYABLE_STATUSES:
            self._held = []
            self._deadline.start(limits.held_s, self._on_late)

    def _read_body(self, data: bytes) -> None:
        payload = self._body.feed(data)
        surplus = self._body.taken < len(data)
        if surplus:
            data = data[: self._body.taken]
        if self._held is not None:
            self._hold(payload)
        elif data:
            self._relay(data, payload)
        if self._body.done and not self.ended:
            self._end(None)
            if surplus:
                self.reusable = False

    def _relay(self, data: bytes, payload: bytes) -> None:
        """Pass body bytes on, and tell who wants to know."""
        now_s = self._terms.clock()
        self._last_byte_s = now_s
        self._meter.feed(payload)
        if self._first_byte_s is None:
            self._begin_reply(now_s)
        else:
            self._deadline.push(now_s + self._terms.timeouts.between_s)
        self._bytes_to_client += len(data)
        self._sink.data(payload if self._dechunk else data)
        if self._first_token_s is None and self._meter.begun:
            self._first_token_s = now_s
            tell = self._terms.on_first_byte
            if tell is not None and self._head is not None and self._head.answers:
                tell(now_s)
        self._tell_progress(now_s)
        if self._sink.congested and not self._body.done and not self._paused:
            # The client has a limit of its own; the worker is not to blame for this wait.
            self._paused = True
            self._deadline.stop()
            self._connection.pause()
            self._wake()

    def _begin_reply(self, now_s: float) -> None:
        assert self._head is not None
        self._first_byte_s = now_s
        if not self._body.done:
            self._deadline.start(self._terms.timeouts.between_s, self._on_late)
        self._sink.head(self._head)

    def _tell_progress(self, now_s: float) -> None:
        events = self._meter.events
        if self._terms.on_progress is None or events == self._told_events:
            return
        if now_s - self._told_s >= self._terms.limits.progress_s:
            self._told_s = now_s
            self._told_events = events
            self._terms.on_progress(now_s, events)

    def _hold(self, payload: bytes) -> None:
        """Keep a 5xx reply's body from the client while another worker may do better."""
        assert self._held is not None
        self._held.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes > self._terms.limits.held_bytes:
            raise WorkerError("status_5xx", "the worker's error reply is too long to keep")

    # The end.

    def _on_late(self) -> None:
        if self._head is None and not self._sending.done:
            self._end(WorkerError("timeout_send", "the worker stopped taking the request"))
        elif self._first_byte_s is None:
            self._end(WorkerError("timeout_first_byte", "the worker took too long to begin"))
        else:
            self._end(WorkerError("timeout_between", "the worker stopped in its reply"))

    def _end(self, error: WorkerError | ClientError | None) -> None:
        """Settle the exchange, once."""
        self.ended = True
        self._wake()
        head = self._head
        if head is not None and self._held is not None:
            if error is None:
                self._held_reply = HeldReply(head, b"".join(self._held))
            self.reusable = error is None and head.reusable
            error = WorkerError(head.kind, f"the worker answered with status {head.status}")
        elif error is None:
            assert head is not None
            if not self._bytes_to_client:
                self._sink.head(head)
            self._sink.finish()
            self.reusable = head.reusable
        self._error = error
        if not self._sending.done:
            self.reusable = False

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _outcome(self) -> Outcome:
        head = self._head
        relayed = head is not None and self._held is None
        return Outcome(
            started_s=self._started_s,
            status=head.status if head is not None else None,
            error=self._error,
            bytes_to_client=self._bytes_to_client,
            first_byte_s=self._first_byte_s,
            last_byte_s=self._last_byte_s,
            events=self._meter.events if relayed else 0,
            usage=self._meter.usage() if relayed else None,
            held=self._held_reply,
            first_token_s=self._first_token_s if self._terms.mark else None,
        )
