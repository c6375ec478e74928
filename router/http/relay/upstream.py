"""A worker's connections, kept alive and bounded, and the one way to send it a request."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

from router.http.errors import WorkerError
from router.http.relay.connection import Connection
from router.http.relay.exchange import Exchange
from router.http.relay.head import request_head
from router.http.relay.reply import (
    Outcome,
    RelayLimits,
    ReplySink,
    Terms,
    Timeouts,
    UpstreamRequest,
)


class Upstream:
    """The connections to one worker. Lifetime: worker."""

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
        """`clock` gives monotonic seconds; `base_path` ("" or "/x", no slash at its end) is put
        before each request's target; `tls` switches TLS on, with `server_name` as the name
        that the worker's certificate must have instead of `host`. Raises ValueError.
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
        self._why_python = "off" if tls is None else "worker_tls"
        self._idle: deque[Connection] = deque()  # the one used last stands last
        self._open: set[Connection] = set()
        self._connecting = 0
        self._closed = False
        self._all_lost = asyncio.Event()
        self._all_lost.set()

    @property
    def open_connections(self) -> int:
        """Connections that exist or are being made, idle ones included."""
        return len(self._open) + self._connecting

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Send `request` to the worker and its reply to `sink`; says what became of it.

        Replies of status 500, 502, 503 and 504 do not reach the sink: `Outcome.held` keeps them.
        All others do, whole and unchanged but for hop-by-hop headers. `on_first_byte(now_s)` is
        called once, of 2xx replies (of an event stream at its first `mark`, where the request has
        one); `on_progress(now_s, events)` at most every `progress_s` of an
        event stream. Cancelling closes the worker's connection at once, which stops its work.
        Raises ClientError(400) for a request that cannot be written as HTTP.
        """
        head = request_head(request, self._host_header, self._base_path)
        told = (on_first_byte, on_progress, request.mark)
        terms = Terms(self._limits, timeouts, self._clock, *told)
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
        outcome.why_python = self._why_python
        return outcome

    def abandon_silent(self) -> None:
        """Give up every exchange whose client has seen nothing yet, for another worker to answer.

        For a worker that does not answer its probes: its machine may be gone without a word.
        """
        for connection in tuple(self._open):
            connection.abandon_silent()

    async def aclose(self) -> None:
        """Close every connection, also those in use, and take no more requests."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._open):
            connection.transport.abort()
        await self._all_lost.wait()

    async def _exchange(
        self,
        connection: Connection,
        request: UpstreamRequest,
        head: bytes,
        sink: ReplySink,
        terms: Terms,
    ) -> Outcome | None:
        """Run one exchange; None if the connection had been closed while it lay idle.

        Workers close idle connections without a word, so an end before any byte of a reply on a
        connection that was used before says nothing about the request or the worker's health.
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
        stale = early and connection.used and not exchange.received_bytes
        return None if stale else outcome

    def _take_idle(self) -> Connection | None:
        """The idle connection used last, which is the one least likely to be closed by now."""
        oldest_s = self._clock() - self._limits.idle_s
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing:
                return connection
        return None

    def _keep(self, connection: Connection) -> None:
        connection.end()
        connection.idle_since_s = self._clock()
        self._idle.append(connection)

    async def _connect(self, connect_s: float) -> Connection:
        """A fresh connection. Raises WorkerError: "busy", "connect" or "timeout_connect"."""
        if self._closed:
            raise WorkerError("connect", "the worker was removed")
        if self.open_connections >= self._limits.max_connections and not self._close_an_idle():
            bound = self._limits.max_connections
            raise WorkerError("busy", f"all {bound} connections to the worker are in use")
        connection = Connection(self._on_lost)
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
            raise WorkerError("connect", f"no connection: {error}") from error
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
        """Make room for a connection; False if none is idle."""
        if not self._idle:
            return False
        connection = self._idle.popleft()
        connection.abort()
        self._open.discard(connection)
        return True

    def _on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._open:
            self._all_lost.set()
