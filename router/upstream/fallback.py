"""Relays in Python those replies that the native relay cannot carry."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import kvkernels
from engine.wire.tensors import LENGTH_HEADER
from router.http.bodies import Body, follow
from router.http.errors import ClientError, WorkerError, WorkerErrorKind, out_of_files
from router.http.framing import parse_head, request_head
from router.http.reply import (
    DENIAL_STATUSES,
    PING,
    RETRYABLE_STATUSES,
    Framing,
    HeldReply,
    Outcome,
    PingedSink,
    RelayLimits,
    ReplyHead,
    ReplySink,
    Terms,
    Timeouts,
    UpstreamRequest,
)
from router.upstream.collected_reply import CollectedReply
from router.upstream.meter import Meter


class Deadline:
    """Calls a function at a deadline that may be moved often. Lifetime: connection.

    A deadline later than the one of the running timer is only stored. When the timer fires too
    early, it is started again for the remaining time. So a thousand events cost a thousand
    assignments instead of a thousand timers. A stopped deadline holds no function, so that it is
    not part of a reference cycle which the garbage collector must find.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at_s = self._fires_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._on_passed: Callable[[], None] | None = None

    def start(self, seconds: float, on_passed: Callable[[], None]) -> None:
        """Set the deadline to `seconds` from now; it may be earlier or later than before."""
        self._on_passed = on_passed
        self._at_s = self._clock() + seconds
        if self._timer is None or self._at_s < self._fires_s:
            self._arm(seconds)

    def push(self, at_s: float) -> None:
        """Move the deadline to the time `at_s` on the clock, which must not be earlier
        than before.
        """
        self._at_s = at_s

    def stop(self) -> None:
        """Stop the deadline: no function is called until the next `start`."""
        self._on_passed = None

    def close(self) -> None:
        """Cancel the timer and drop the function, so that it is never called."""
        self._on_passed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_s = self._at_s
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        on_passed = self._on_passed
        if on_passed is None:
            return
        left_s = self._at_s - self._clock()
        if left_s > 0:
            self._arm(left_s)
        else:
            self._on_passed = None
            on_passed()


class Receiver(Protocol):
    """The present user of a connection to a worker, which the connection calls; an exchange."""

    @property
    def silent(self) -> bool:
        """True if the client has received nothing, or only what another worker could continue."""

    def feed(self, data: bytes) -> None:
        """Process bytes that the worker sent."""

    def lost(self, exc: Exception | None) -> None:
        """Note that the connection ended; `exc` is None if the worker ended it in good order."""

    def writable(self) -> None:
        """Write more, because the worker has read enough of the request."""


class WorkerConnection(asyncio.Protocol):
    """One TCP (or TLS) connection to a worker, used for one exchange after another. Lifetime:
    connection.
    """

    def __init__(
        self, on_lost: Callable[[WorkerConnection], None], clock: Callable[[], float]
    ) -> None:
        self.transport: asyncio.Transport
        self.deadline = Deadline(clock)  # of the exchange that it carries
        self.idle_since_s = 0.0
        self.lost = False
        self.used = False  # it has carried a whole exchange before the present one
        self._write_paused = False
        self._receiver: Receiver | None = None
        self._on_lost = on_lost

    @property
    def closing(self) -> bool:
        """True if nothing more can be sent on the connection."""
        return self.transport.is_closing()

    @property
    def can_write(self) -> bool:
        """True if the worker can take more bytes now."""
        return not self._write_paused and not self.transport.is_closing()

    def begin(self, receiver: Receiver) -> None:
        """Call `receiver` for all events of the connection from now on; if the connection has ended
        already, call it for that at once.
        """
        if self.lost:
            receiver.lost(None)
        else:
            self._receiver = receiver

    def end(self) -> None:
        """End the exchange, after which the connection is idle."""
        self._receiver = None
        self.used = True

    def abort(self) -> None:
        """Close the connection at once, even with unsent or unread bytes."""
        self._receiver = None
        self.transport.abort()

    def abandon_silent(self) -> None:
        """Close the connection unless the client has received a part of the reply; the exchange
        then treats it as lost.
        """
        if self._receiver is None or self._receiver.silent:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading from the worker until `resume`."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from the worker again."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # Methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # A worker's machine that vanishes during a long silent prefill is noticed this way.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            # No request is open: these bytes could be taken for the answer to the next one.
            self.transport.abort()
        else:
            self._receiver.feed(data)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._receiver is not None:
            self._receiver.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.deadline.close()
        self._on_lost(self)
        if self._receiver is not None:
            self._receiver.lost(exc)
            self._receiver = None


class Sending:
    """Writes the rest of a long request body to a worker, no faster than the worker reads it.
    Lifetime: request.
    """

    def __init__(self, connection: WorkerConnection, body: bytes, step_bytes: int) -> None:
        """Begin with the whole body. `step_bytes` of it are written before each wait for the
        worker.
        """
        self._connection = connection
        view = memoryview(body)
        self._unsent = [view[at : at + step_bytes] for at in range(0, len(body), step_bytes)]
        self._unsent.reverse()  # the next piece is last

    @property
    def done(self) -> bool:
        """True if the whole body was written."""
        return not self._unsent

    @property
    def can_write_next(self) -> bool:
        """True if a part of the body is left and the worker can take more bytes now."""
        return bool(self._unsent) and self._connection.can_write

    def write_next(self) -> None:
        """Write the next part of the body."""
        self._connection.transport.write(self._unsent.pop())


_VERSION = b"HTTP/1."
_EVENT_SEPARATORS = (b"\n\n", b"\r\n\r\n")
_PING_STEP_S = 0.01  # a timer may fire a little early
_JSON_LENGTH = LENGTH_HEADER.lower().encode()  # of answers whose tensors are bytes (KServe v2)


class Exchange:
    """One request to a worker and its reply, on one connection. Lifetime: request.

    The reply's head is passed to the sink only together with the first body byte that is part of an
    answer. Until then the client has received nothing, so that another worker can take over, even
    if this worker dies during prefill.
    """

    # Most exchanges change few of these fields, so the class has their first values.
    ended = False
    reusable = False  # the connection may carry another exchange
    received_bytes = 0
    _waker: asyncio.Future[None] | None = None
    _bug: Exception | None = None
    _paused = False
    _sending: Sending | None = None  # the rest of a long request
    _buffer = b""  # of the head, until it is complete
    _heads_bytes = 0
    _head: ReplyHead | None = None
    _body: Body
    _meter: Meter
    _judge: kvkernels.AnswerJudge | None = None  # until it is an answer
    _withheld: list[tuple[bytes, bytes]] | None = None  # from the client, raw and payload
    _withheld_bytes = 0
    _held: list[bytes] | None = None
    _held_bytes = 0
    _denial: list[bytes] | None = None  # as it came, while it may be about the model
    _denial_body: list[bytes]
    _nothing = ""  # why a reply of status 200 is held
    _flaw = ""  # why a reply that its client has is a failure of its worker all the same
    _body_begun = False  # a part of the body came
    _reported_s = float("-inf")
    _told_events = 0
    _patience: Deadline | None = None  # of a client that waits for what is withheld
    _pinger: asyncio.TimerHandle | None = None
    _between_s: float  # between two reads of the body

    def __init__(
        self, connection: WorkerConnection, method: str, sink: ReplySink, terms: Terms
    ) -> None:
        self._connection = connection
        self._method = method
        self._sink = sink
        self._dechunk = sink.dechunk
        self._terms = terms
        self._outcome = Outcome(terms.clock())  # as far as it is known
        self._deadline = connection.deadline

    async def run(self, head: bytes, body: bytes) -> Outcome:
        """Send the request and relay the reply. Cancelling it abandons the request.

        Errors of the worker and of the client are not raised, but are in the outcome.
        """
        try:
            self._connection.begin(self)
            if not self.ended:
                self._send(head, body)
                self._expect_more()
                if self._terms.ping_s:
                    self._ping_later(self._terms.ping_s)
            while not self.ended:
                if self._paused:
                    await self._drain_client()
                elif self._sending is not None and self._sending.can_write_next:
                    self._sending.write_next()
                    if self._head is None:
                        self._expect_more()
                else:
                    self._waker = asyncio.get_running_loop().create_future()
                    await self._waker
        finally:
            self._deadline.stop()
            if self._patience is not None:
                self._patience.close()
            if self._pinger is not None:
                self._pinger.cancel()
        broken = self._outcome.error is not None or self._bug is not None
        if broken and self._outcome.bytes_to_client:
            # Last of all: the client's end cancels the very task that runs this.
            self._sink.abort()
        if self._bug is not None:
            raise self._bug
        return self._complete()

    def _send(self, head: bytes, body: bytes) -> None:
        """Write the request's head and as much of its body as can be written without waiting; keep
        the rest for later.
        """
        connection, step_bytes = self._connection, self._terms.limits.write_bytes
        if connection.closing:
            return  # its end was reported or will be
        if len(body) <= step_bytes:
            connection.transport.writelines((head, body) if body else (head,))
        else:
            self._sending = Sending(connection, body, step_bytes)
            connection.transport.write(head)

    @property
    def _all_sent(self) -> bool:
        return self._sending is None or self._sending.done

    def _expect_more(self) -> None:
        """Set the deadline for the worker's next step while its reply has not begun."""
        timeouts = self._terms.timeouts
        late_s = timeouts.first_byte_s if self._all_sent else timeouts.send_s
        self._deadline.start(late_s, self._on_late)

    async def _drain_client(self) -> None:
        """Wait until the client has read its bytes, then read from the worker again."""
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

    # Methods that the connection calls.

    @property
    def silent(self) -> bool:
        """True if the client has received nothing of the reply, or only a part that another worker
        can continue.
        """
        return not self._outcome.bytes_to_client or self._sink.movable

    def feed(self, data: bytes) -> None:
        """Process bytes of the worker's reply."""
        if self.ended:
            self.reusable = False  # bytes after the end belong to no known request
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
        """Process the end of the connection to the worker."""
        if self.ended:
            self.reusable = False
        elif exc is not None and not isinstance(exc, OSError):
            # An exception in our own callbacks ends the connection too; it is not the worker's.
            self._bug = exc
            self.ended = True
            self._wake()
        elif exc is None and self._head is not None and self._head.framing is Framing.CLOSE:
            self._end_of_connection()
        else:
            where = "in the middle of" if self._head is not None else "before"
            self._end(WorkerError("early_close", f"the worker hung up {where} its reply"))

    def writable(self) -> None:
        """Continue to write the request, because the worker can take more bytes."""
        self._wake()

    def _end_of_connection(self) -> None:
        """Complete a reply whose body lasts until the worker closes the connection."""
        try:
            if self._judge is not None:
                self._examine(b"", b"", last=True)
        except WorkerError as error:
            self._end(error)
        else:
            self._end(None)

    # The reply.

    def _read_heads(self, data: bytes) -> bytes:
        """Read the reply's head, and any 1xx heads before it. Return the bytes after it."""
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
        terms, limits = self._terms, self._terms.limits
        self._head = head
        self._outcome.status = head.status
        self._body = follow(head, limits)
        self._meter = Meter(head.event_stream, limits.tail_bytes, terms.mark, terms.keeps_ends)
        if head.status in RETRYABLE_STATUSES:
            self._hold_from_now()
        elif head.status == 200 and terms.due is not None and self._method != "HEAD":
            self._judge = kvkernels.AnswerJudge(
                terms.due, head.event_stream, head.coded, limits.held_bytes
            )
            self._withheld = []
        elif head.status in DENIAL_STATUSES and not isinstance(self._sink, CollectedReply):
            self._denial, self._denial_body = [], []

    def _hold_from_now(self) -> None:
        self._held = []
        self._deadline.start(self._terms.limits.held_s, self._on_late)

    def _read_body(self, data: bytes) -> None:
        payload = self._body.feed(data)
        surplus = self._body.taken < len(data)
        if surplus:
            data = data[: self._body.taken]
        if self._held is not None:
            self._hold(payload)
        elif self._judge is not None:
            self._examine(data, payload, self._body.done)
        elif data and self._denial is not None:
            self._keep(self._denial, data, payload)
        elif data:
            self._relay(data, payload)
        if self._body.done and not self.ended:
            self._end(None)
            if surplus:
                self.reusable = False

    # Until it is known whether the reply is an answer.

    def _examine(self, data: bytes, payload: bytes, last: bool) -> None:
        """Check whether the body's bytes are an answer, and pass the withheld bytes to the client
        once they are.
        """
        judge = self._judge
        assert judge is not None
        if judge.feed(payload, last):
            self._judge = None
            self._outcome.refused = judge.refuses
            if not judge.answers and self._withheld is None:  # its client has seen it begin
                self._flaw = judge.failure
            elif not judge.answers:
                self._fail(judge.failure, payload)
                return
            elif not self._withheld:  # it answers by its first bytes, as nearly all do
                self._withheld = None
        if self._withheld is None:
            if data:
                self._relay(data, payload)
            return
        self._withheld.append((data, payload))
        self._withheld_bytes += len(data)
        if self._judge is None or self._withheld_bytes > self._terms.limits.held_bytes:
            self._show()
        elif data:
            self._wait_for_answer(judge.pings)

    def _fail(self, why: str, payload: bytes) -> None:
        """Keep a reply of status 200 that has no answer, as a 5xx reply is kept, because another
        worker may do better.
        """
        assert self._withheld is not None
        pieces = [*(kept for _, kept in self._withheld), payload]
        self._withheld = None
        self._nothing = f"the worker's reply of status 200 {why}"
        self._hold_from_now()
        for piece in pieces:
            self._hold(piece)

    def _wait_for_answer(self, pings: bool) -> None:
        """Note that a part of the reply arrived and is withheld from the client until the answer
        begins.

        A part that only keeps connections open is passed to the client after a while anyway,
        because that is its purpose.
        """
        self._body_begun = True
        self._outcome.last_byte_s = self._terms.clock()
        self._deadline.start(self._terms.timeouts.between_s, self._on_late)
        if pings and self._patience is None:
            self._patience = Deadline(self._terms.clock)
            self._patience.start(self._terms.limits.held_s, self._on_patience_lost)

    def _on_patience_lost(self) -> None:
        try:
            self._show()
        except WorkerError as error:
            self._end(error)

    def _show(self) -> None:
        """Pass the withheld bytes to the client, although it is not known yet whether an answer
        follows.
        """
        waited, self._withheld = self._withheld, None
        if waited is None or self.ended:
            return
        data = b"".join(raw for raw, _ in waited)
        payload = b"".join(part for _, part in waited)
        if data:
            self._relay(data, payload)

    def _relay(self, data: bytes, payload: bytes) -> None:
        """Pass bytes of the body to the client, and call the observers of first byte and
        progress.
        """
        outcome, terms, meter = self._outcome, self._terms, self._meter
        now_s = outcome.last_byte_s = terms.clock()
        meter.feed(payload)
        self._body_begun = True
        if outcome.first_byte_s is None and self._judge is None and not self._flaw:
            outcome.first_byte_s = now_s
        if not outcome.bytes_to_client:
            self._begin_reply()
        else:
            self._deadline.push(now_s + self._between_s)
        outcome.bytes_to_client += len(data)
        self._sink.data(payload if self._dechunk else data)
        if outcome.first_byte_s is not None:
            if outcome.first_token_s is None and meter.begun:
                outcome.first_token_s = now_s
                if self._between_s != terms.timeouts.between_s and not self._body.done:
                    self._between_s = terms.timeouts.between_s
                    self._deadline.start(self._between_s, self._on_late)
                tell = terms.on_first_byte
                if tell is not None and self._head is not None and self._head.answers:
                    tell(now_s)
            if terms.on_progress is not None:
                self._report_progress(terms.on_progress, now_s)
        if self._sink.congested and not self._body.done and not self._paused:
            # The client has a limit of its own; the worker is not to blame for this wait.
            self._paused = True
            self._deadline.stop()
            self._connection.pause()
            self._wake()

    def _begin_reply(self) -> None:
        """Pass the reply's head to the client. The first token may then take as long as a first
        byte, because some protocols send events before the worker has computed anything.
        """
        assert self._head is not None
        timeouts, self._dechunk = self._terms.timeouts, self._sink.dechunk
        self._between_s = timeouts.between_s
        if not self._meter.begun:
            self._between_s = max(timeouts.first_byte_s, timeouts.between_s)
        if not self._body.done:
            self._deadline.start(self._between_s, self._on_late)
        self._sink.head(self._head)

    # Comments to a client while the worker is silent.

    def _ping_later(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._pinger = loop.call_later(seconds, self._ping_if_silent)

    def _ping_if_silent(self) -> None:
        outcome, terms = self._outcome, self._terms
        heard_s = outcome.started_s if outcome.last_byte_s is None else outcome.last_byte_s
        left_s = terms.ping_s - (terms.clock() - heard_s)
        if self.ended:
            return
        if left_s <= 0.0:
            self._ping()
            left_s = terms.ping_s
        self._ping_later(max(left_s, _PING_STEP_S))

    def _ping(self) -> None:
        """Write a comment to the client, before the reply or between two of its events."""
        head = self._head
        if not self._outcome.bytes_to_client:
            if isinstance(self._sink, PingedSink):
                self._sink.ping()
        elif head is not None and head.event_stream and not head.coded and not self._paused:
            whole = self._dechunk or self._body.between_chunks
            if whole and self._meter.tail.endswith(_EVENT_SEPARATORS):
                framed = PING if self._dechunk else b"%x\r\n%b\r\n" % (len(PING), PING)
                self._sink.data(framed)

    def _report_progress(self, report: Callable[[float, int], None], now_s: float) -> None:
        events = self._meter.events
        if (
            events != self._told_events
            and now_s - self._reported_s >= self._terms.limits.progress_s
        ):
            self._reported_s = now_s
            self._told_events = events
            report(now_s, events)

    def _hold(self, payload: bytes) -> None:
        """Keep bytes of a failed reply's body, which the client may get if no other worker does
        better.
        """
        assert self._held is not None
        self._held.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes > self._terms.limits.held_bytes:
            kind: WorkerErrorKind = "no_answer" if self._nothing else "status_5xx"
            raise WorkerError(kind, "the worker's error reply is too long to keep")

    def _keep(self, denial: list[bytes], data: bytes, payload: bytes) -> None:
        """Keep bytes of a refusal, because it may say that the worker lacks the model. A long
        refusal does not say that, and is passed to the client.
        """
        denial.append(data)
        self._body_begun = True
        self._denial_body.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes <= self._terms.limits.held_bytes:
            self._deadline.start(self._terms.timeouts.between_s, self._on_late)
            return
        self._denial = None
        self._relay(b"".join(denial), b"".join(self._denial_body))

    # The end.

    def _on_late(self) -> None:
        if self._head is None and not self._all_sent:
            self._end(WorkerError("timeout_send", "the worker stopped taking the request"))
        elif not self._body_begun:
            self._end(WorkerError("timeout_first_byte", "the worker took too long to begin"))
        else:
            self._end(WorkerError("timeout_between", "the worker stopped in its reply"))

    def _end(self, error: WorkerError | ClientError | None) -> None:
        """Set the result of the exchange, once; `error` None means that the reply is complete."""
        self.ended = True
        self._wake()
        head = self._head
        if head is not None and self._held is not None:
            if error is None:
                self._outcome.held = HeldReply(head, b"".join(self._held))
            self.reusable = error is None and head.reusable
            if self._nothing:
                error = WorkerError("no_answer", self._nothing)
            else:
                error = head.error
        elif error is None and self._denial is not None:
            assert head is not None
            body = b"".join(self._denial_body)
            self._meter.feed(body)
            self._outcome.held = HeldReply(head, body)
            self.reusable = head.reusable
        elif error is None:
            assert head is not None
            if not self._outcome.bytes_to_client:
                self._sink.head(head)
            self._sink.finish()
            self.reusable = head.reusable
            if self._terms.due is not None and head.event_stream and not self._flaw:
                self._flaw = kvkernels.late_failure(self._meter.tail)
        self._outcome.error = error
        if not self._all_sent:
            self.reusable = False

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _complete(self) -> Outcome:
        """Add the token counts, which are known only at the reply's end, and return the outcome."""
        outcome, terms = self._outcome, self._terms
        if self._head is not None and self._held is None:  # it was relayed
            outcome.events = self._meter.events
            outcome.usage = self._meter.usage()
            if terms.keeps_ends:
                outcome.kept = self._kept()
        if not terms.mark:
            outcome.first_token_s = None
        if self._flaw and outcome.error is None:
            why = f"the worker's reply of status 200 {self._flaw}"
            outcome.error, outcome.final = WorkerError("no_answer", why), True
        return outcome

    def _kept(self) -> bytes:
        """Return the kept parts of the reply's body. It is empty for tensors sent as bytes that
        were not kept whole, because text in them could be mistaken for fields.
        """
        assert self._head is not None
        binary = any(name.lower() == _JSON_LENGTH for name, _ in self._head.headers)
        return b"" if binary and not self._meter.whole else self._meter.kept


class Upstream:
    """Sends requests to one worker over its connections. Lifetime: worker."""

    def __init__(
        self,
        host: str,
        port: int,
        clock: Callable[[], float],
        *,
        base_path: str = "",
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        limits: RelayLimits | None = None,
    ) -> None:
        """Store the worker's address. Raises ValueError if it is malformed.

        `clock` returns monotonic seconds. `base_path` ("" or "/x", without a slash at its end) is
        put before each request's target. `tls` None means plain http; otherwise `server_name` is
        the name that the worker's certificate must have instead of `host`.
        """
        if not 0 < port < 65_536:
            raise ValueError(f"port must be 1..65535, got {port}")
        if base_path and (not base_path.startswith("/") or base_path.endswith("/")):
            raise ValueError(f'base_path must be "" or "/x" without a last slash: {base_path!r}')
        self.host = host
        self.port = port
        self._clock = clock
        self._base_path = base_path
        self._tls = tls
        self._server_name = server_name if tls is not None else None
        self._limits = limits or RelayLimits()
        name = b"[%s]" % host.encode() if ":" in host else host.encode("idna")
        default_port = 443 if tls is not None else 80
        self._host_header = name if port == default_port else b"%s:%d" % (name, port)
        self._fallback_reason = "off" if tls is None else "worker_tls"
        self._idle: deque[WorkerConnection] = deque()  # the latest used is last
        self._open: set[WorkerConnection] = set()
        self._connecting = 0
        self._closed = False
        self._all_lost = asyncio.Event()
        self._all_lost.set()

    @property
    def open_connections(self) -> int:
        """The number of connections to the worker that are open or being opened, including idle
        ones.
        """
        return len(self._open) + self._connecting

    @property
    def idle_connections(self) -> int:
        """The number of open connections that no request uses."""
        return len(self._idle)

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Send `request` to the worker and its reply to `sink`, and return the outcome.

        Replies with `RETRYABLE_STATUSES` do not reach the sink but are kept in `Outcome.held`; so
        are replies with `DENIAL_STATUSES`, unless they are long. All others reach the sink whole
        and unchanged except for hop-by-hop headers. `on_first_byte(now_s)` is called once, for 2xx
        replies (for an event stream at its first `mark`, if the request has one);
        `on_progress(now_s, events)` is called at most every `progress_s` of an event stream.
        Cancelling closes the worker's connection at once, which stops the worker's computation.
        Raises ClientError(400) if the request cannot be written as HTTP.
        """
        head = request_head(request, self._host_header, self._base_path)
        told = (on_first_byte, on_progress, request.mark, request.keeps_ends, request.due)
        terms = Terms(self._limits, timeouts, self._clock, *told, ping_s=request.ping_s)
        started_s = self._clock()
        outcome = None
        connection = self._take_idle()
        if connection is not None:
            outcome = await self._exchange(connection, request, head, sink, terms)
        if outcome is None:
            try:
                connection = await self._connect(timeouts.connect_s)
            except WorkerError as error:
                return Outcome(started_s=started_s, error=error)
            outcome = await self._exchange(connection, request, head, sink, terms)
            assert outcome is not None  # only a connection that was used before can be stale
        outcome.fallback_reason = self._fallback_reason
        return outcome

    def abandon_silent(self) -> None:
        """Abandon every exchange whose client has received nothing yet, so that another worker can
        answer.

        This is for a worker that does not answer its probes: its machine may have vanished without
        closing connections.
        """
        for connection in tuple(self._open):
            connection.abandon_silent()

    async def aclose(self) -> None:
        """Close every connection, even those in use, and send no further requests."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._open):
            connection.transport.abort()
        await self._all_lost.wait()

    async def _exchange(
        self,
        connection: WorkerConnection,
        request: UpstreamRequest,
        head: bytes,
        sink: ReplySink,
        terms: Terms,
    ) -> Outcome | None:
        """Run one exchange. Return None if the connection turns out to have been closed while it
        was idle.

        Workers close idle connections without notice. So if a connection that was used before ends
        before any byte of a reply, that means nothing about the request or the worker's health.
        """
        exchange = Exchange(connection, request.method, sink, terms)
        try:
            outcome = await exchange.run(head, request.body)
        finally:
            if exchange.reusable and not connection.closing:
                self._keep(connection)
            else:
                connection.abort()
        error = outcome.error
        early = isinstance(error, WorkerError) and error.kind == "early_close"
        outcome.stale = early and connection.used and not exchange.received_bytes
        return None if outcome.stale and not request.once else outcome

    def _take_idle(self) -> WorkerConnection | None:
        """Return the idle connection that was used last, because the worker is least likely to have
        closed it; None if there is none.
        """
        oldest_s = self._clock() - self._limits.idle_s
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing:
                return connection
        return None

    def _keep(self, connection: WorkerConnection) -> None:
        connection.end()
        connection.idle_since_s = self._clock()
        self._idle.append(connection)

    async def _connect(self, connect_s: float) -> WorkerConnection:
        """Open a new connection. Raises WorkerError: "busy", "out_of_files", "connect" or
        "timeout_connect".
        """
        if self._closed:
            raise WorkerError("connect", "the worker was removed")
        if self.open_connections >= self._limits.max_connections and not self._close_an_idle():
            bound = self._limits.max_connections
            raise WorkerError("busy", f"all {bound} connections to the worker are in use")
        connection = WorkerConnection(self._on_lost, self._clock)
        self._connecting += 1
        try:
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname=self._server_name,
                )
        except TimeoutError as error:
            raise WorkerError("timeout_connect", f"no connection within {connect_s:g} s") from error
        except (OSError, UnicodeError) as error:
            kind: WorkerErrorKind = "out_of_files" if out_of_files(error) else "connect"
            raise WorkerError(kind, f"no connection: {error}") from error
        finally:
            self._connecting -= 1
        # Counted from here on, and not when asyncio makes it: uvloop does not report the end of
        # a connection whose making was cancelled.
        if not connection.lost:
            self._open.add(connection)
            self._all_lost.clear()
        if self._closed:
            connection.abort()
            raise WorkerError("connect", "the worker was removed")
        return connection

    def _close_an_idle(self) -> bool:
        """Close an idle connection to make room for another. Return False if none is idle."""
        if not self._idle:
            return False
        connection = self._idle.popleft()
        connection.abort()
        self._open.discard(connection)
        return True

    def _on_lost(self, connection: WorkerConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._open:
            self._all_lost.set()
