"""Writes the reply to a client; the worker's bytes are passed to the client's transport unchanged.

A reply lends its client's socket to the relay's thread. If it cannot, a word says why Python code
must relay the reply: `off` (by the configuration), `worker_tls`, `client_tls`, `http_1_0`, `unsent`
(bytes wait for the client), `client_gone`, `judged` (a path that not every engine has: another
worker may have to answer), `moved` (a stream continues at another worker), `ids` (its client sees
token ids), `pinged` (its client gets comments while its worker is silent), `renamed` (the answer
gets the model's requested name), `worker_gone`; for gRPC calls it is `grpc`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import kvkernels
from router.http.forwarding import ForwardedHeaders, end_to_end
from router.http.messages import Request
from router.http.reply import (
    RANK_HEADER,
    Framing,
    Header,
    ReplyHead,
    ReplySink,
    UpstreamRequest,
)
from router.record.trace import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from kvkernels import AnswerDue
    from router.record.trace import Trace

KEY_HEADERS = (b"authorization", b"x-api-key")  # API keys: OpenAI's header, Anthropic's header
_TRACE_HEADERS = frozenset({TRACEPARENT, TRACESTATE})
_RANK_HEADERS = frozenset({RANK_HEADER})
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, zero seconds


def upstream_request(
    request: Request,
    body: bytes,
    before: tuple[Header, ...] = (),
    after: tuple[Header, ...] = (),
    *,
    hidden: frozenset[bytes] = frozenset(),
    rank: int | None = None,
    trace: Trace | None = None,
    due: AnswerDue | None = None,
    once: bool = False,
) -> UpstreamRequest:
    """Return the request for a worker, made from the client's request and `body`.

    `before` and `after` are headers that the router adds before and after those for trace and rank.
    `hidden` has the lower-case names of client headers that the worker does not get. `rank` is the
    data-parallel rank of the engine that must answer, in place of the client's choice. `trace`
    returns the trace headers, in place of the client's own. `due` and `once` are explained at
    `UpstreamRequest`.
    """
    target = request.target
    if not target.startswith("/"):  # absolute form, as proxies are asked: scheme://host/path
        target = "/" + target.partition("://")[2].partition("/")[2]
    if trace is not None:
        if trace.replaces:
            hidden |= _TRACE_HEADERS
        before += trace.to_worker()
    if rank is not None:
        hidden |= _RANK_HEADERS
        before = (*before, (RANK_HEADER, b"%d" % rank))
    headers = ForwardedHeaders(request.headers, hidden)
    return UpstreamRequest(
        request.method, target, headers, body, before + after, due=due, once=once
    )


class Reply(ReplySink, Protocol):
    """The client's reply, which the relay writes, for any protocol; a handler returns it as the
    answer.
    """

    @property
    def status(self) -> int:
        """The HTTP status of the reply."""

    @property
    def keep_alive(self) -> bool:
        """True if the client's connection stays open after the reply."""

    @property
    def body_length(self) -> int:
        """The number of body bytes that were written."""

    @property
    def begun(self) -> bool:
        """True if the client has received a part of the reply."""


class ClientSocket(NamedTuple):
    """A client's socket that is lent to the relay's thread, with what the thread must know to
    answer on it.
    """

    fd: int  # to be only ever written to, and not at all once `lent_to`'s function was called
    extra_lines: bytes  # headers of the router's own, each with its CRLF
    keep_alive: bool  # the client asks for its connection to go on
    buffer_bytes: int


class ClientReply:
    """The HTTP reply to a client; a `ReplySink` that a handler returns as its answer when the relay
    has ended. Lifetime: request.
    """

    movable = False  # bytes that went on as they came belong to one worker
    status = 200  # the status of a reply that is cut off early, if no other is known
    keep_alive = False  # the client's connection outlives this reply
    body_length = 0  # bytes written, head included
    _ends_with_connection = False
    _begun = b""  # the head, until the bytes that follow it in the same turn

    def __init__(
        self,
        request: Request,
        buffer_bytes: int = 262_144,
        extra_headers: tuple[Header, ...] = (),
    ) -> None:
        """Make the reply to a request. If more than `buffer_bytes` wait for the client to read,
        reading from the worker is paused. `extra_headers` are added to the worker's headers.
        """
        self._client = request
        self._extra_headers = extra_headers
        self.dechunk = self.http_1_0 = request.http_1_0  # HTTP/1.0 knows no chunks
        self._buffer_bytes = buffer_bytes

    @property
    def client_transport(self) -> asyncio.Transport | None:
        """The transport of the client's connection; None if the client is gone."""
        return self._client.connection.transport

    @property
    def congested(self) -> bool:
        """True if more than `buffer_bytes` wait for the client to read them."""
        return self._client.connection.writing_paused

    def head(self, head: ReplyHead) -> None:
        """Begin the reply with the worker's status and headers; hop-by-hop headers are
        rewritten.
        """
        self._bound()
        self.status = head.status
        chunked = head.framing is Framing.CHUNKED
        self._ends_with_connection = head.framing is Framing.CLOSE or (chunked and self.http_1_0)
        self.keep_alive = self._client.keep_alive and not self._ends_with_connection
        lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason)]
        theirs = end_to_end(head.headers)
        if head.status == 204:
            theirs = [header for header in theirs if header[0].lower() != b"content-length"]
        lines += [b"%b: %b" % header for header in theirs]
        lines += [b"%b: %b" % header for header in self._extra_headers]
        if chunked and not self.http_1_0:
            lines.append(b"Transfer-Encoding: chunked")
        if not self.keep_alive:
            lines.append(b"Connection: close")
        elif self.http_1_0:
            lines.append(b"Connection: keep-alive")
        self._begun = b"\r\n".join(lines) + b"\r\n\r\n"

    def data(self, data: bytes) -> None:
        """Write bytes of the body exactly as the worker sent them."""
        self._write(data)

    async def drain(self) -> None:
        """Wait until the client has read its bytes. Raises ConnectionError if the client is
        gone.
        """
        await self._client.connection.drain()

    def finish(self) -> None:
        """Complete the reply; the server then keeps or closes the connection."""
        if self._begun:
            self._write(b"")

    def abort(self, late: bool = False) -> None:
        """Close the client's connection, so that the client cannot take the reply for complete."""
        self.keep_alive = False
        transport = self._client.connection.transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if self._ends_with_connection and sock is not None:
            # Its end is the body's end: only a reset says that this one came too early.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    # The client's socket, lent to a writer for a while.

    @property
    def begun(self) -> bool:
        """True if the client has received a part of the reply."""
        return self.body_length > 0

    def lend(self) -> ClientSocket | str:
        """Lend the client's socket, to which this object then writes nothing until `take_back` or
        `note_written`; or return a word that says why it is not lent.
        """
        transport = self._client.connection.transport
        if self.dechunk:
            return "http_1_0"
        if transport is None or transport.is_closing():
            return "client_gone"
        if transport.get_extra_info("sslcontext") is not None:
            return "client_tls"
        if (sock := transport.get_extra_info("socket")) is None:
            return "client_gone"
        if transport.get_write_buffer_size():
            return "unsent"
        lines = b""
        for name, value in self._extra_headers:
            lines += name + b": " + value + b"\r\n"
        return ClientSocket(sock.fileno(), lines, self._client.keep_alive, self._buffer_bytes)

    def lent_to(self, give_back: Callable[[], object] | None) -> None:
        """Set the function that is called before the client's socket is closed; None if the socket
        is not lent.
        """
        self._client.connection.lent_to = give_back

    def take_back(self, end: kvkernels.RelayEnd, goes_on: bool = False) -> None:
        """Take over the state of a reply, or of its beginning, that the relay's thread wrote to the
        lent socket.

        `goes_on` True means that more of the reply may be written by this object.
        """
        self.status = end.status
        self.keep_alive = end.persistent
        unsent = end.unsent
        self.note_written(end.written - len(unsent), end.ends_with_connection)
        if unsent or goes_on:
            self._bound()
        if unsent:
            self._write(unsent)

    def note_written(self, written_bytes: int, ends_with_connection: bool) -> None:
        """Note how many bytes of the reply, including its head, the relay's thread wrote; it writes
        no more.
        """
        self._ends_with_connection = ends_with_connection
        self.body_length += written_bytes
        self._client.written_bytes = self.body_length

    def _bound(self) -> None:
        """Make `congested` True when more than `buffer_bytes` wait for the client to read them."""
        if (transport := self._client.connection.transport) is not None:
            transport.set_write_buffer_limits(high=self._buffer_bytes)

    def _write(self, data: bytes) -> None:
        if self._begun:
            data = self._begun + data
            self._begun = b""
        self.body_length += len(data)
        self._client.written_bytes = self.body_length
        transport = self._client.connection.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)


class LendingSink(ABC):
    """A `ReplySink` of a stream that another worker may continue from where the relay's thread
    stopped.
    """

    @abstractmethod
    def lend(self) -> tuple[ClientReply, kvkernels.RelayJournalTerms] | str:
        """Return the client's reply and how to read the stream's events, or a word for why Python
        code must relay the stream.

        If the relay's thread takes the socket, `taken_back` is called later, unless the request is
        given up.
        """

    @abstractmethod
    def taken_back(self, end: kvkernels.RelayEnd) -> None:
        """Take the client's reply back from the relay's thread, in the state that `end` describes;
        from now on this object writes it.
        """


def reply_for_thread(
    sink: ReplySink,
) -> tuple[ClientReply | str, LendingSink | None, kvkernels.RelayJournalTerms | None]:
    """Return the reply to which the relay's thread may write, or a word for why there is none. For
    a stream, also return its sink and how to read its events.
    """
    if isinstance(sink, ClientReply):
        return sink, None, None
    if not isinstance(sink, LendingSink):
        return getattr(sink, "by_fallback", "judged"), None, None
    lent = sink.lend()
    return (lent, None, None) if isinstance(lent, str) else (lent[0], sink, lent[1])
