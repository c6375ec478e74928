"""Runs the native relay: a C++ thread that carries the bytes of requests and replies once a worker
is chosen.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, cast

import kvkernels
from router.http.errors import ClientError, WorkerError, WorkerErrorKind
from router.http.framing import parse_head, request_head
from router.http.reply import (
    HeldReply,
    Outcome,
    RelayLimits,
    ReplySink,
    Timeouts,
    UpstreamRequest,
)
from router.upstream.client_reply import ClientSocket, reply_for_thread
from router.upstream.collected_reply import CollectedReply
from router.upstream.fallback import Upstream
from router.upstream.meter import usage_in

_NO_SOCKET = -1  # file descriptor of a request without a client's socket
_KEPT_S = 10.0


class Addresses:
    """The IP addresses of one worker's host, which are looked up from time to time. Lifetime:
    worker.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[str] = []
        self._stale_s = float("-inf")
        try:
            self._numeric = str(ipaddress.ip_address(host))
        except ValueError:
            self._numeric = ""

    def stale(self, now_s: float) -> bool:
        """Return whether a new look-up by `fresh` is due."""
        return now_s >= self._stale_s

    async def fresh(self, now_s: float, within_s: float) -> list[str] | None:
        """Return the addresses if they are new or have changed; None if they are the same as those
        returned last.

        Raises WorkerError("connect") if the host name was never found, and "timeout_connect" if the
        look-up takes longer than `within_s`. A name that was found before keeps its addresses.
        """
        if not self.stale(now_s):
            return None
        if self._numeric:
            self._stale_s = float("inf")
            return [self._numeric]
        self._stale_s = now_s + _KEPT_S
        try:
            found = await self._found(within_s)
        except WorkerError:
            if self._known:
                return None
            self._stale_s = float("-inf")
            raise
        if found == self._known:
            return None
        self._known = found
        return found

    async def _found(self, within_s: float) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                rows = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            message = f"no address within {within_s:g} s"
            raise WorkerError("timeout_connect", message) from error
        except (OSError, UnicodeError) as error:
            raise WorkerError("connect", f"no connection: {error}") from error
        return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))


def times_of(timeouts: Timeouts) -> kvkernels.RelayTimeouts:
    """Return a request's timeouts as the native relay's type."""
    return kvkernels.RelayTimeouts(
        timeouts.connect_s,
        timeouts.send_s,
        timeouts.first_byte_s,
        timeouts.between_s,
        timeouts.client_s,
    )


def pool_of(limits: RelayLimits) -> kvkernels.RelayPool:
    """Return the limits of one worker's connections as the native relay's type."""
    return kvkernels.RelayPool(
        limits.max_connections,
        limits.idle_s,
        limits.header_bytes,
        limits.chunk_line_bytes,
        limits.held_bytes,
        limits.held_s,
        limits.tail_bytes,
        limits.progress_s,
    )


class Waiting:
    """A request that the relay's thread carries. Lifetime: request."""

    __slots__ = ("_on_first_byte", "_on_progress", "end", "reported")

    def __init__(
        self,
        end: asyncio.Future[kvkernels.RelayEnd],
        on_first_byte: Callable[[float], None] | None,
        on_progress: Callable[[float, int], None] | None,
    ) -> None:
        self.end = end
        self.reported: kvkernels.RelayEnd | None = (
            None  # of the thread, whoever waits for it or not
        )
        self._on_first_byte = on_first_byte
        self._on_progress = on_progress

    def on_report(self, at_s: float, status: int, events: int) -> None:
        """Pass a report of the relay's thread to the request's observers. If an observer raises an
        error, the request fails with it.
        """
        try:
            if 200 <= status < 300 and self._on_first_byte is not None:
                self._on_first_byte(at_s)
            if events and self._on_progress is not None:
                self._on_progress(at_s, events)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, and told at once
            loop = self.end.get_loop()
            loop.call_exception_handler({"message": "a reply's observer", "exception": error})
            if not self.end.done():
                self.end.set_exception(error)


_CLIENT_FAULT_STATUS = {"slow_client": 408, "client_closed": 499}


class NativeRelay:
    """The relay's thread, and the queue of its reports to the event loop. Lifetime: process, within
    one event loop.
    """

    def __init__(self) -> None:
        self._thread: kvkernels.Relay | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, Waiting] = {}
        self._nobodys = pool_of(RelayLimits())  # of no worker: it has no connections to close

    @classmethod
    def if_available(cls, how: Literal["auto", "python"]) -> NativeRelay | None:
        """Return a native relay if `how` allows it and it was built; None means that Python code
        relays everything.
        """
        return cls() if how == "auto" and cls.usable() else None

    @staticmethod
    def usable() -> bool:
        """Return whether the native relay was built, which needs Linux and a compiler."""
        return kvkernels.Relay is not None

    def thread(self) -> kvkernels.Relay:
        """Return the relay's thread; the first call starts it."""
        if self._thread is None:
            self._thread = kvkernels.Relay()
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._thread.marks_fd, self._take)
        return self._thread

    async def until_closed(self, pool: kvkernels.RelayPool) -> None:
        """Close a worker's connections, and return when they are closed."""
        await self._begun(self.thread().close(pool), None, None).end

    async def turn(self) -> None:
        """Wait until the relay's thread has completed a turn. A thread that hangs never does."""
        if self._thread is not None:
            await self.until_closed(self._nobodys)

    async def over(
        self,
        job: int,
        on_first_byte: Callable[[float], None] | None,
        on_progress: Callable[[float, int], None] | None,
        given_up: Callable[[int, bool], None],
    ) -> kvkernels.RelayEnd:
        """Wait for the end of the request `job`, which was just submitted, and return it. It must
        be called at once, because reports of a job for which nobody waits are dropped.

        If the call is cancelled or an observer fails, `given_up` is called with the number of bytes
        that the client has, including the head, and whether the reply ends with the connection. A
        cancellation after the client has received the whole reply is ignored: a client that hangs
        up at once is often noticed before the end of its reply is reported.
        """
        thread, waiting = self.thread(), self._begun(job, on_first_byte, on_progress)
        try:
            return await waiting.end
        except BaseException as error:
            end, left = waiting.reported, isinstance(error, asyncio.CancelledError)
            if end is not None:
                if left and end.written and not end.fault:
                    return end
                given_up(end.written, end.ends_with_connection)
                raise
            written, ends_with_connection, whole = thread.cancel(job)
            if left and whole:
                return await self._reported_end(waiting)
            self._waiting.pop(job, None)
            given_up(written, ends_with_connection)
            raise

    async def _reported_end(self, waiting: Waiting) -> kvkernels.RelayEnd:
        """Return the end of a reply that the client has received; the relay's thread reports it
        within its present turn.

        Cancelling does not stop this, because the request was answered and its end must be
        accounted for.
        """
        waiting.end = waiting.end.get_loop().create_future()
        while not waiting.end.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(waiting.end)
        return waiting.end.result()

    def _begun(
        self,
        job: int,
        on_first_byte: Callable[[float], None] | None,
        on_progress: Callable[[float, int], None] | None,
    ) -> Waiting:
        # The loop is kept: asking for the running one is a system call each time.
        assert self._loop is not None
        waiting = Waiting(self._loop.create_future(), on_first_byte, on_progress)
        self._waiting[job] = waiting
        return waiting

    def stop(self) -> None:
        """Stop the thread and all its requests. Further calls do nothing."""
        if self._thread is not None and self._loop is not None:
            self._loop.remove_reader(self._thread.marks_fd)
            self._thread.stop()
            self._take()
            self._thread = None

    def _take(self) -> None:
        assert self._thread is not None
        for job, at_s, status, events, end in self._thread.take():
            waiting = self._waiting.get(job)
            if waiting is None:
                continue  # given up meanwhile
            if end is None:
                waiting.on_report(at_s, status, events)
            else:
                del self._waiting[job]
                waiting.reported = end
                if not waiting.end.done():
                    waiting.end.set_result(end)


class NativeUpstream(Upstream):
    """Sends requests without TLS to one worker by the native relay. Lifetime: worker."""

    def __init__(
        self,
        relay: NativeRelay,
        host: str,
        port: int,
        clock: Callable[[], float],
        *,
        base_path: str = "",
        limits: RelayLimits | None = None,
    ) -> None:
        """Make the connections; the arguments are those of `Upstream`. `clock` must be
        `time.monotonic`, which the relay's thread uses, too.
        """
        super().__init__(host, port, clock, base_path=base_path, limits=limits)
        self._relay = relay
        self._addresses = Addresses(host, port)
        self._pool = pool_of(self._limits)
        self._timeouts = Timeouts()  # of the request before
        self._times = times_of(self._timeouts)

    @property
    def open_connections(self) -> int:
        return super().open_connections + self._pool.open

    @property
    def idle_connections(self) -> int:
        return super().idle_connections + self._pool.idle

    @property
    def thread_connections(self) -> int:
        """The number of `open_connections` that belong to the relay's thread."""
        return self._pool.open

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Send `request` by the relay's thread, or by Python code if the thread cannot; see
        `Upstream.send`.
        """
        if isinstance(sink, CollectedReply):
            return await self._collect(request, sink, timeouts)
        reply, stream, journal = reply_for_thread(sink)
        asked = (request, sink, timeouts, on_first_byte, on_progress)
        if isinstance(reply, str) or self._closed:
            return await self._by_fallback("worker_gone" if self._closed else str(reply), *asked)
        if (lost := await self._look_up(timeouts)) is not None:
            return lost
        head = request_head(request, self._host_header, self._base_path)
        client = reply.lend()
        if isinstance(client, str):
            return await self._by_fallback(client, *asked)
        observed = on_first_byte is not None or on_progress is not None
        job = self._submit(request, head, client, timeouts, observed, journal)
        reply.lent_to(partial(self._relay.thread().cancel, job))
        try:
            end = await self._relay.over(job, on_first_byte, on_progress, reply.note_written)
        except Exception:
            if reply.begun:
                reply.abort()
            raise
        finally:
            reply.lent_to(None)
        if end.written:
            reply.take_back(end, goes_on=stream is not None and bool(end.fault))
        if stream is not None:
            stream.taken_back(end)
        elif end.written and end.fault:
            reply.abort()
        return _outcome(request, end)

    async def _collect(
        self, request: UpstreamRequest, sink: CollectedReply, timeouts: Timeouts
    ) -> Outcome:
        """Send a request whose reply is for the router itself and not for a client."""
        if self._closed:
            return await self._by_fallback("worker_gone", request, sink, timeouts)
        if (lost := await self._look_up(timeouts)) is not None:
            return lost
        head = request_head(request, self._host_header, self._base_path)
        nobody = ClientSocket(_NO_SOCKET, b"", keep_alive=False, buffer_bytes=sink.limit_bytes)
        job = self._submit(request, head, nobody, timeouts, False, None)
        end = await self._relay.over(job, None, None, lambda *_: None)
        if not end.fault:
            sink.take(end, request.method)
        return _outcome(request, end, collected=True)

    async def _look_up(self, timeouts: Timeouts) -> Outcome | None:
        """Look up the worker's addresses if that is due. Return the outcome if the worker has none,
        otherwise None.
        """
        started_s = self._clock()
        try:
            if self._addresses.stale(started_s) and (
                fresh := await self._addresses.fresh(started_s, timeouts.connect_s)
            ):
                self._relay.thread().set_addresses(self._pool, fresh, self.port)
        except WorkerError as error:
            return Outcome(started_s=started_s, error=error)
        return None

    async def _by_fallback(self, why: str, *asked: Any) -> Outcome:
        outcome = await super().send(*asked)
        outcome.fallback_reason = why
        return outcome

    def abandon_silent(self) -> None:
        """Abandon every exchange whose client has received nothing yet, including those of the
        relay's thread.
        """
        super().abandon_silent()
        self._relay.thread().abandon_silent(self._pool)

    async def aclose(self) -> None:
        """Close every connection, including those of the relay's thread."""
        self._closed = True
        await self._relay.until_closed(self._pool)
        await super().aclose()

    def _submit(
        self,
        request: UpstreamRequest,
        head: bytes,
        client: ClientSocket,
        timeouts: Timeouts,
        observed: bool,
        journal: kvkernels.RelayJournalTerms | None,
    ) -> int:
        if timeouts is not self._timeouts:  # else the same for every request until a reload
            self._timeouts, self._times = timeouts, times_of(timeouts)
        return self._relay.thread().submit(
            self._pool,
            head,
            request.body,
            request.method == "HEAD",
            client.fd,
            client.extra_lines,
            client.keep_alive,
            client.buffer_bytes,
            self._times,
            observed,
            journal,
            request.due,
            request.once,
        )


def _outcome(request: UpstreamRequest, end: kvkernels.RelayEnd, collected: bool = False) -> Outcome:
    held = None
    if end.held and (end.fault or not collected):
        held = HeldReply(parse_head(end.held_head, request.method), end.held_body)
    error = _error(end, held)
    return Outcome(
        started_s=end.started_s,
        status=end.status or None,
        error=error,
        refused=end.refused,
        stale=end.stale,
        bytes_to_client=end.bytes_to_client,
        first_byte_s=end.first_byte_s,
        last_byte_s=end.last_byte_s,
        events=end.events,
        usage=usage_in(end.usage),
        held=held,
        final=error is not None and not end.fault,
    )


def _error(end: kvkernels.RelayEnd, held: HeldReply | None) -> WorkerError | ClientError | None:
    fault = end.fault
    if not fault:
        flaw = end.flaw
        return (
            WorkerError("no_answer", f"the worker's reply of status 200 {flaw}") if flaw else None
        )
    if status := _CLIENT_FAULT_STATUS.get(fault):
        return ClientError(status, end.message, code=fault)
    if fault == "cancelled":  # the thread was stopped with this under way
        return ClientError(499, end.message, code="client_closed")
    if held is not None and fault != "no_answer":
        return held.head.error
    busy_s = 0.0 if fault == "busy" and end.status else None  # its reply was too long to keep
    return WorkerError(cast(WorkerErrorKind, fault), end.message, busy_s)
