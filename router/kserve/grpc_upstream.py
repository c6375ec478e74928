"""Sends requests by KServe's gRPC to one worker, with the same interface as the HTTP relay.

A request's target is the full name of a gRPC method, and its body is one message. The reply's body
is the answer's message; in a stream, each message is one call of `data`. A worker's refusal becomes
a reply with the HTTP status that Triton gives the same error, with `grpc-status` and `grpc-message`
as headers and Triton's `{"error": ...}` as its body. Each request of a client's stream has its own
stream to the worker, so that it can be cancelled alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
from grpc import aio

from router.engines.spec import WorkerSpec
from router.engines.triton import is_triton_queue_full
from router.fleet.upstreams import GrpcOpener
from router.http.errors import ClientError, WorkerError, WorkerErrorKind
from router.http.reply import (
    RETRYABLE_STATUSES,
    Framing,
    Header,
    HeldReply,
    Outcome,
    RelayLimits,
    ReplyHead,
    ReplySink,
    Sends,
    Terms,
    Timeouts,
    UpstreamRequest,
)
from router.http.tls import WorkerTls, pem
from router.kserve.messages import SERVICE, has_outputs, http_status, stream_failure

STREAM = f"/{SERVICE}/ModelStreamInfer"
CODE_HEADER, MESSAGE_HEADER = b"grpc-status", b"grpc-message"
_LONG_BYTES = 1 << 16  # a message of this length has outputs: it is not examined
_NO_MODEL = "' is not found"  # how Triton's words for an unknown model end
_TOO_LONG = "larger than max"  # how gRPC says that it reads no message of this length
_NO_METHOD = frozenset({"", "Method not found!"})  # servers' texts for an unknown method
# Metadata that belong to one connection or that the library writes itself.
_NOT_PASSED = frozenset(
    {b"content-type", b"user-agent", b"te", b"host", b"content-length", b"connection"}
)
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # the core decides on these
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own to each worker
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class GrpcUpstream:
    """The gRPC connection to one worker. Lifetime: worker."""

    def __init__(
        self,
        address: str,
        clock: Callable[[], float],
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str | None = None,
        limits: RelayLimits | None = None,
    ) -> None:
        """Make a connection to `address`, which is a host and port.

        `credentials` None means plain text. `server_name` is the name in the worker's certificate,
        if it is not the host.
        """
        self._address = address
        self._clock = clock
        self._credentials = credentials
        self._options: list[tuple[str, int | str]] = list(_OPTIONS)
        if server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self._limits = limits or RelayLimits()
        self._channel: aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._exchanges: set[_Exchange] = set()
        self._closed = False

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Send a request and relay its reply, as `router.upstream.fallback.Upstream` does;
        `request.mark` is ignored.
        """
        told = (on_first_byte, on_progress, None, request.keeps_ends)
        terms = Terms(self._limits, timeouts, self._clock, *told)
        exchange = _Exchange(sink, terms)
        if len(self._exchanges) >= self._limits.max_connections:
            bound = self._limits.max_connections
            return exchange.outcome(WorkerError("busy", f"all {bound} calls are in use"))
        self._exchanges.add(exchange)
        try:
            await self._connected(timeouts.connect_s)
            method = self._method(request.target)
            await exchange.run(method, request, streams=request.target == STREAM)
        except (WorkerError, ClientError) as error:
            return exchange.outcome(error)
        finally:
            self._exchanges.discard(exchange)
        return exchange.outcome(None)

    def abandon_silent(self) -> None:
        """Abandon the exchanges whose clients have received nothing, as
        `router.upstream.fallback.Upstream` does.
        """
        for exchange in tuple(self._exchanges):
            if exchange.silent:
                exchange.abandon("the worker was given up before it answered")

    async def aclose(self) -> None:
        """End all running calls, and start no further ones."""
        self._closed = True
        for exchange in tuple(self._exchanges):
            exchange.abandon("the worker was removed")
        if self._channel is not None:
            await self._channel.close()

    def _method(self, target: str) -> Any:
        known = self._methods.get(target)
        if known is None:
            assert self._channel is not None, "connected"
            make = self._channel.stream_stream if target == STREAM else self._channel.unary_unary
            known = self._methods[target] = make(target)
        return known

    async def _connected(self, connect_s: float) -> None:
        """Wait at most `connect_s` seconds until the worker is connected. Raises WorkerError if it
        is not.
        """
        if self._closed:
            raise WorkerError("connect", "the worker was removed")
        if self._channel is None:
            self._channel = self._opened()
        channel, ready = self._channel, grpc.ChannelConnectivity.READY
        if (state := channel.get_state(try_to_connect=True)) is ready:
            return
        try:
            async with asyncio.timeout(connect_s):
                while state is not ready:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise WorkerError("connect", self._no_connection())
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            why = f"{self._no_connection()} within {connect_s:g} s"
            raise WorkerError("timeout_connect", why) from error

    def _no_connection(self) -> str:
        return f"no gRPC connection to {self._address} (the worker's grpc=HOST:PORT changes it)"

    def _opened(self) -> aio.Channel:
        if self._credentials is None:
            return aio.insecure_channel(self._address, self._options)
        return aio.secure_channel(self._address, self._credentials, self._options)


def credentials_of(files: WorkerTls) -> grpc.ChannelCredentials:
    """Return the TLS credentials for gRPC connections to workers. Raises TlsError if a file cannot
    be read.
    """
    ca, key, cert = (None if p is None else pem(p) for p in (files.ca, files.key, files.cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def grpc_opener(
    clock: Callable[[], float], files: WorkerTls | None, limits: Callable[[], RelayLimits]
) -> GrpcOpener:
    """Return a function that opens a gRPC connection to a worker's address. `files` are the TLS
    files for https workers.

    Raises `router.http.tls.TlsError` if a file cannot be used.
    """
    trusted = credentials_of(files or WorkerTls())

    def open_at(address: str, spec: WorkerSpec) -> Sends:
        secure = spec.url.startswith("https:")
        return GrpcUpstream(address, clock, trusted if secure else None, spec.server_name, limits())

    return open_at


class _Exchange:
    """One request to a worker over gRPC, and its answer. Lifetime: one dispatch of the request."""

    def __init__(self, sink: ReplySink, terms: Terms) -> None:
        self._sink = sink
        self._terms = terms
        self._started_s = terms.clock()
        self._call: Any = None
        self._abandoned = ""  # the reason, if another part ended it
        self._status: int | None = None
        self._held: HeldReply | None = None
        self._bytes = 0
        self._events = 0
        self._kept = b""  # the last message with outputs, which may report tokens
        self._reported_s = -1.0
        self._first_byte_s: float | None = None
        self._last_byte_s: float | None = None

    @property
    def silent(self) -> bool:
        """True if the client has received nothing of the answer."""
        return self._bytes == 0

    def abandon(self, why: str) -> None:
        """End the exchange as a failure of the worker, for the reason `why`."""
        self._abandoned = why
        if self._call is not None:
            self._call.cancel()

    def outcome(self, error: WorkerError | ClientError | None) -> Outcome:
        """Return the outcome of the exchange, which failed with `error`, or succeeded if that is
        None.
        """
        return Outcome(
            started_s=self._started_s,
            status=self._status,
            error=error,
            bytes_to_client=self._bytes,
            first_byte_s=self._first_byte_s,
            last_byte_s=self._last_byte_s,
            events=self._events,
            kept=self._kept,
            held=self._held,
            fallback_reason="grpc",
        )

    async def run(self, method: Any, request: UpstreamRequest, *, streams: bool) -> None:
        """Send the request and relay the answer. Raises WorkerError or ClientError. Cancelling it
        ends the call at the worker.
        """
        if self._abandoned:
            raise WorkerError("early_close", self._abandoned)
        self._status = None
        metadata = metadata_of(request)
        try:
            if streams:
                await self._stream(method, request.body, metadata)
            else:
                await self._unary(method, request.body, metadata)
        except aio.AioRpcError as error:
            self._refused(error)
        except asyncio.CancelledError:
            if not self._abandoned:
                raise
            self._broken(WorkerError("early_close", self._abandoned))
        finally:
            if self._call is not None:
                self._call.cancel()  # has no effect on a call that is over

    async def _unary(self, method: Any, body: bytes, metadata: aio.Metadata) -> None:
        call = self._call = method(body, metadata=metadata)
        try:
            async with asyncio.timeout(self._terms.timeouts.first_byte_s):
                message = await call
        except TimeoutError:
            self._broken(WorkerError("timeout_first_byte", "the worker took too long to answer"))
        self._relay(message)
        self._sink.finish()

    async def _stream(self, method: Any, body: bytes, metadata: aio.Metadata) -> None:
        timeouts, loop = self._terms.timeouts, asyncio.get_running_loop()
        call = self._call = method(metadata=metadata)
        try:
            async with asyncio.timeout(timeouts.first_byte_s) as limit:
                await call.write(body)
                await call.done_writing()
                while (message := await call.read()) is not aio.EOF:
                    self._relay_piece(message)
                    if self._sink.congested:
                        limit.reschedule(None)
                        await self._drained()
                    limit.reschedule(loop.time() + timeouts.between_s)
        except asyncio.InvalidStateError:  # it was over before the request went out
            await call.read()  # says how
        except TimeoutError:
            kind: WorkerErrorKind = "timeout_first_byte" if self.silent else "timeout_between"
            self._broken(WorkerError(kind, "the worker stopped in its answer"))
        if self.silent:  # it answers by nothing at all, as a model may
            self._begin()
        self._sink.finish()

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self._terms.timeouts.client_s):
                await self._sink.drain()
        except TimeoutError as error:
            self._sink.abort()
            raise ClientError(408, "the client reads too slowly") from error

    def _relay_piece(self, message: bytes) -> None:
        """Pass one message of a streamed answer on to the client."""
        if self.silent and (failure := stream_failure(message)):
            said = _error(failure)
            if is_triton_queue_full(503, said):
                self._status, self._held = 503, HeldReply(_head(503, b"14", failure), said)
                raise WorkerError("busy", failure[:200], 0.0)
            if failure.startswith("Request for unknown model: '") and failure.endswith(_NO_MODEL):
                self._status, self._held = 404, HeldReply(_head(404, b"5", failure), said)
                raise WorkerError("no_model", failure[:200])
        answers = len(message) > _LONG_BYTES or has_outputs(message)
        self._relay(message, answers)
        if not answers:
            return
        self._events += 1
        now_s, terms = self._last_byte_s or 0.0, self._terms
        if self._events == 1 and terms.on_first_byte is not None:
            terms.on_first_byte(now_s)
        if terms.on_progress is not None and now_s - self._reported_s >= terms.limits.progress_s:
            self._reported_s = now_s
            terms.on_progress(now_s, self._events)

    def _relay(self, message: bytes, answers: bool = True) -> None:
        self._last_byte_s = self._terms.clock()
        if self._first_byte_s is None:
            self._first_byte_s = self._last_byte_s
            self._begin()
        self._bytes += len(message) or 1  # an empty message was seen, too
        if self._terms.keeps_ends and len(message) <= _LONG_BYTES and answers:
            self._kept = message
        self._sink.data(message)

    def _begin(self) -> None:
        self._status = 200
        self._sink.head(ReplyHead(200, b"OK", (), Framing.CLOSE))

    def _refused(self, error: aio.AioRpcError) -> None:
        """Handle a call that the worker or the connection ended with an error. Raises WorkerError
        if another worker may succeed.
        """
        code, details = error.code(), error.details() or ""
        if not self.silent:
            self._broken(WorkerError("early_close", f"{code.name}: {details[:200]}"))
        if code is grpc.StatusCode.CANCELLED:
            raise WorkerError("early_close", f"the worker cancelled it: {details[:200]}")
        number: int = code.value[0]
        status, body = http_status(number), _error(details)
        if code is grpc.StatusCode.UNIMPLEMENTED and details in _NO_METHOD:
            body = b""
        head = _head(status, b"%d" % number, details)
        self._status = status
        too_long = status == 429 and _TOO_LONG in details  # the request is, for any worker
        if status in RETRYABLE_STATUSES and not too_long:
            self._held = HeldReply(head, body)
            error = head.error
            raise WorkerError(error.kind, f"{code.name}: {details[:200]}", error.busy_s)
        self._sink.head(head)
        self._sink.data(body)
        self._sink.finish()

    def _broken(self, error: WorkerError) -> None:
        """Raise `error`, after closing an answer that has begun so that it cannot look complete."""
        if not self.silent:
            self._sink.abort()
        raise error


def metadata_of(request: UpstreamRequest) -> aio.Metadata:
    """Return a request's headers as gRPC metadata, without headers that belong to one connection
    only.
    """
    pairs = []
    for name, value in (*request.headers, *request.internal_headers):
        name = name.lower()
        if name in _NOT_PASSED or name.startswith((b"grpc-", b":")) or name.endswith(b"-bin"):
            continue
        if value.isascii() and value.decode("ascii").isprintable():
            pairs.append((name.decode("ascii"), value.decode("ascii")))
    return aio.Metadata(*pairs)


def grpc_error(headers: tuple[Header, ...]) -> tuple[int, str] | None:
    """Return the gRPC code and message of a refusal; None if the refusal was not sent by gRPC."""
    found = dict(headers)
    if CODE_HEADER not in found:
        return None
    return int(found[CODE_HEADER]), found.get(MESSAGE_HEADER, b"").decode("utf-8", "replace")


def _head(status: int, code: bytes, details: str) -> ReplyHead:
    told = ((CODE_HEADER, code), (MESSAGE_HEADER, details.encode("utf-8", "replace")))
    return ReplyHead(status, b"", told, Framing.CLOSE)


def _error(details: str) -> bytes:
    """Return the body with which Triton reports this error over HTTP."""
    return msgspec.json.encode({"error": details})
