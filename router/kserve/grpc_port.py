"""Serves KServe v2 over gRPC to Triton's clients; each request is routed by itself.

The behaviour follows triton-inference-server/server, `src/grpc` (unary and stream handlers).
Answers of models that are not decoupled come in the order of their requests, those of decoupled
models as they are made. An error is a message of the stream, which continues, except for a model's
own error if the client asks for `triton_grpc_error`. Requests of one stream go to as many workers
as the policy chooses, but those of one sequence go one after another to the worker that has the
sequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import grpc
from grpc import aio

from router.body.paths import KSERVE_GRPC
from router.engines.triton import error_in
from router.http.errors import ClientError, WorkerError
from router.http.messages import Answer, Request, Response, error_response
from router.http.parser import Fields, Head
from router.http.reply import (
    Header,
    Timeouts,
    UpstreamRequest,
)
from router.kserve.grpc_request import GrpcCarrier, GrpcReply, Named
from router.kserve.grpc_upstream import STREAM
from router.kserve.http import code_in, tritons_error
from router.kserve.messages import (
    RPCS,
    SERVICE,
    STATUS_OF,
    GrpcTarget,
    grpc_answer,
    http_request_of,
    model_of,
    stream_error,
    target_of,
)
from router.kserve.port import KservePort
from router.record.request_record import DEADLINE
from router.request.inference import Inference
from router.request.service import Service
from router.server.client_port import answer_or_error
from router.server.grpc_listener import GrpcListener, GrpcPeer, serves
from router.server.settings import GrpcPortSettings
from router.upstream.collected_reply import CollectedReply

_AT_ONCE = 1_024  # requests of one stream that are under way; then no more of it is read
_MESSAGE_CHARS = 4_096  # of a refusal
_ASKED_BYTES = 16 << 20  # an answer that is passed on
_ERRORS_END = "triton_grpc_error"  # metadata: an error ends the stream
# As gRPC itself ends such a call of any server's; some clients look for the words.
_PAST_DEADLINE = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_LATE_S = 0.01  # left of a call's time when its deadline has passed to whoever rounds it down


class Caller:
    """The client that made a gRPC call, with the call's metadata. Lifetime: call."""

    def __init__(self, context: Any, deadline_header: str) -> None:
        pairs = context.invocation_metadata() or ()
        lines = []
        for name, value in pairs:
            if not (name.startswith(("x-warmroute-internal-", "grpc-")) or name.endswith("-bin")):
                lines.append(f"{name}: {value}")
        left_s = context.time_remaining()
        if left_s is not None and not any(name == deadline_header for name, _ in pairs):
            lines.append(f"{deadline_header}: {min(max(int(left_s * 1e3), 1), 86_400_000)}")
        text = "\r\n".join(("POST / HTTP/1.1", *lines)).encode("latin-1", "replace")
        self.fields = Fields(text + b"\r\n\r\n")
        self.peer = GrpcPeer(context.peer())

    def request(self, path: str, body: bytes, method: str = "POST") -> Request:
        """Return a request to `path` with this body, as if the client had sent it by HTTP."""
        head = Head(b"", len(body), method, path, self.fields, False)
        return Request(self.peer, head, body)  # type: ignore[arg-type]


class StreamReply(GrpcReply):
    """A worker's answer to one request of a client's stream, passed on message by message.
    Lifetime: one dispatch of the request.
    """

    def __init__(
        self, http: Request, headers: tuple[Header, ...], stream: ClientStream, in_order: bool
    ) -> None:
        """Make the answer for the request `http`. With `in_order`, its messages are kept until
        `release` is called.
        """
        super().__init__(http, headers)
        self._stream = stream
        self._in_order = in_order

    @property
    def begun(self) -> bool:
        return self.body_length > 0

    @property
    def congested(self) -> bool:  # type: ignore[override]
        return not self._in_order and self._stream.congested

    def data(self, data: bytes) -> None:
        self.body_length += len(data) or 1
        self._http.written_bytes = self.body_length
        if self._in_order or self.error is not None:
            self._parts.append(data)
        else:
            self._stream.put(data)

    async def drain(self) -> None:
        await self._stream.drained()

    def release(self) -> None:
        """Pass on the kept messages, because all earlier answers of the stream are complete."""
        if self._in_order and self.error is None:
            for message in self._parts:
                self._stream.put(message)


class GrpcPort(GrpcListener):
    """Answers all calls of KServe's gRPC service. Lifetime: process."""

    def __init__(
        self,
        inference: Inference,
        service: Service,
        kserve: KservePort,
        settings: Callable[[], GrpcPortSettings],
    ) -> None:
        self._inference = inference
        self._service = service
        self._kserve = kserve
        self.roles_of = kserve.roles_of
        self._running: dict[Named, int] = {}
        super().__init__(self._method, self._serves, settings)

    def _method(self, method: str) -> Any:
        """Return the handler for a gRPC method; None for an unknown method."""
        service, _, rpc = method.removeprefix("/").partition("/")
        if method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if method in KSERVE_GRPC:
            return grpc.unary_unary_rpc_method_handler(self._infer)
        if service == SERVICE and rpc in RPCS:
            return grpc.unary_unary_rpc_method_handler(partial(self._call, rpc))
        return None

    # --- inference ----------------------------------------------------------------------------

    def caller(self, context: Any) -> Caller:
        """Return the client that made a gRPC call."""
        return Caller(context, self._inference.reader.terms.deadlines.deadline_header)

    async def _infer(self, message: bytes, context: Any) -> bytes:
        """Answer a ModelInfer call."""
        http = self.caller(context).request(f"/{SERVICE}/ModelInfer", message)
        target: list[GrpcTarget] = []
        answer = await self.answer(http, GrpcReply, target)
        if isinstance(answer, GrpcReply):
            context.set_trailing_metadata(_metadata(answer.headers))
            if answer.status < 300:
                return answer.body
        elif isinstance(answer, Response):
            fields = ((k.encode(), v.encode("latin-1")) for k, v in answer.headers.items())
            context.set_trailing_metadata(_metadata(tuple(fields)))
        code, why = self.refusal(answer, target[0].model if target else None)
        if isinstance(answer, Response) and code_in(answer.body) == DEADLINE:
            code, why = _PAST_DEADLINE
        context.set_code(code)
        context.set_details(why)
        return b""

    async def answer(
        self,
        http: Request,
        make_reply: Callable[[Request, tuple[Header, ...]], GrpcReply],
        known: list[GrpcTarget],
    ) -> Answer:
        """Return the answer to one inference request, which may be an error. The request's target
        is appended to `known` as soon as it was read.
        """

        async def handle(http: Request) -> Answer:
            if not known:
                known.append(target_of(http.body, roles=self.roles_of))
            carrier = GrpcCarrier(http, known[0], make_reply, self._running)
            with self._inference.begin(http, carrier) as state:
                return await self._inference.answer(state, known[0])

        return await answer_or_error(handle, http, self._service.faulty)

    def refusal(self, answer: Answer, model: str | None) -> tuple[grpc.StatusCode, str]:
        """Return the gRPC code and message of an answer to inference that is an error."""
        no_path = isinstance(answer, Response) and code_in(answer.body) == "path_not_served"
        if no_path and model is not None and self._kserve.awaits_grpc(model):
            why = f"no worker of model {model!r} speaks gRPC now; the router's log says where"
            return grpc.StatusCode.UNAVAILABLE, why[:_MESSAGE_CHARS]
        return _refusal(answer, model)

    async def _stream(self, _: object, context: Any) -> None:
        """Answer a ModelStreamInfer call."""
        await ClientStream(self, context, self._inference.attempts.terms.client_buffer_bytes).run()

    def decoupled(self, model: str) -> bool:
        """Return whether a model is decoupled: it sends its answers when they are ready, in any
        order.
        """
        return self.roles_of(model).decoupled

    # --- all else -----------------------------------------------------------------------------

    async def _call(self, rpc: str, message: bytes, context: Any) -> bytes:
        """Answer a call of the service that is not inference."""
        caller = self.caller(context)

        async def handle(http: Request) -> Answer:
            if RPCS[rpc] == "passed_on":
                return await self._passed_on(rpc, http)
            method, path, body = http_request_of(rpc, message)
            try:
                answer = await self._kserve.answer(caller.request(path, body, method))
            except ClientError as error:
                answer = Response(error.status, error.body())
            try:
                return Response(200, grpc_answer(rpc, answer.status, answer.body))
            except WorkerError as error:
                return error_response(502, error.message)

        answer = await answer_or_error(
            handle, caller.request(f"/{SERVICE}/{rpc}", message), _ignore_status
        )
        if isinstance(answer, Response) and answer.status < 300:
            return answer.body
        code, why = _refusal(answer, None)
        context.set_code(code)
        context.set_details(why)
        return b""

    async def _passed_on(self, rpc: str, http: Request) -> Answer:
        """Send a call to any server that has the model, and return its unchanged answer. Raises
        ClientError.
        """
        last: Response | None = None
        for member in self._kserve.servers_of(model_of(rpc, http.body)[0], http):
            if member.grpc is None:
                continue
            collected = CollectedReply(_ASKED_BYTES)
            sent = UpstreamRequest("POST", f"/{SERVICE}/{rpc}", body=http.body)
            outcome = await member.grpc.send(sent, collected, Timeouts(first_byte_s=5.0))
            if outcome.error is None and collected.held is not None:
                last = Response(collected.held.head.status, collected.body)
                if last.status < 300:
                    return last
        return last or Response(503, b'{"error":"no server answered"}')

    def _serves(self, service: str) -> bool | None:
        """Return whether a gRPC service is ready; None if there is no service of this name."""
        return serves(self._service) if service in ("", SERVICE) else None


class ClientStream:
    """A client's stream of requests: each request is routed by itself, and the answers of all are
    written into the stream. Lifetime: call.
    """

    def __init__(self, port: GrpcPort, context: Any, buffer_bytes: int) -> None:
        """Make the stream of one call. If more than `buffer_bytes` wait for the client to read,
        workers are paused.
        """
        self._port = port
        self._context = context
        self._caller = port.caller(context)
        self._errors_end = self._caller.fields.get(_ERRORS_END) == "true"
        self._buffer_bytes = buffer_bytes
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._changed = asyncio.Event()  # set if a message is to be written, or if none will follow
        self._room = asyncio.Event()
        self._room.set()
        self._done = False
        self._reading: asyncio.Task[Any] | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._sequences: dict[tuple[str, str], asyncio.Event] = {}  # the latest request of each

    @property
    def congested(self) -> bool:
        """True if more than `buffer_bytes` of answers wait for the client to read them."""
        return not self._room.is_set()

    def put(self, message: bytes) -> None:
        """Send a message to the client, after all earlier ones."""
        self._out.append(message)
        self._out_bytes += len(message)
        if self._out_bytes > self._buffer_bytes:
            self._room.clear()
        self._changed.set()

    async def drained(self) -> None:
        """Wait until the client has read enough of the written bytes that workers need not be
        paused.
        """
        await self._room.wait()

    async def run(self) -> None:
        """Answer all requests of the stream, then send the call's status. It is cancelled if the
        client leaves.
        """
        stopping = _Beside(self._port.stopping.wait())
        async with _Beside(self._write()) as writing, stopping as stops:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._read(group, stops)
                if not self._ended:  # its client sees that further requests are not answered
                    self._context.set_code(grpc.StatusCode.UNAVAILABLE)
                    self._context.set_details("the router is stopping")
            except* _EndedError as ended:
                code, why = ended.exceptions[0].args
                self._context.set_code(code)
                self._context.set_details(why)
            finally:
                await _stopped(self._reading)
            self._done = True
            self._changed.set()
            await writing

    @property
    def _ended(self) -> bool:
        """Return whether the client has closed its side of the stream."""
        reading = self._reading
        if reading is None or not reading.done() or reading.cancelled() or reading.exception():
            return False
        return reading.result() is aio.EOF

    async def _message(self, stops: asyncio.Task[Any]) -> Any:
        """Return the client's next message, or EOF when the client ends the stream or the router
        stops.
        """
        reading = self._reading = asyncio.ensure_future(self._context.read())
        await asyncio.wait((reading, stops), return_when=asyncio.FIRST_COMPLETED)
        return await reading if reading.done() else aio.EOF

    async def _read(self, group: asyncio.TaskGroup, stops: asyncio.Task[Any]) -> None:
        turn = asyncio.Event()  # of the request that is answered next of those that are in order
        turn.set()
        while (message := await self._message(stops)) is not aio.EOF:
            await self._slots.acquire()
            http = self._caller.request(STREAM, message)
            known: list[GrpcTarget] = []
            why: ClientError | None = None
            try:
                known.append(target_of(message, True, self._port.roles_of))
            except ClientError as error:
                why = error
            before = after = None
            if not known or not self._port.decoupled(known[0].model):
                before, turn = turn, asyncio.Event()
                after = turn
            group.create_task(self._one(http, known, why, before, after))

    async def _one(
        self,
        http: Request,
        known: list[GrpcTarget],
        garbage: ClientError | None,
        before: asyncio.Event | None,
        after: asyncio.Event | None,
    ) -> None:
        """Answer one request. Its answer is written after `before` is set, and sets `after` when it
        is complete.
        """
        try:
            async with self._in_sequence(known[0] if known else None):
                if garbage is not None:
                    answer: Answer = Response(garbage.status, garbage.body())
                else:
                    reply = partial(StreamReply, stream=self, in_order=before is not None)
                    answer = await self._port.answer(http, reply, known)
            if before is not None:
                await before.wait()
            self._end(answer, known[0] if known else None)
        finally:
            self._slots.release()
            if after is not None:
                after.set()

    def _end(self, answer: Answer, target: GrpcTarget | None) -> None:
        """Write the end of an answer, or the error it ended with. Raises _EndedError if the error
        ends the whole stream.
        """
        if isinstance(answer, StreamReply):
            answer.release()
            if answer.error is None:
                return
        if (left_s := self._context.time_remaining()) is not None and left_s < _LATE_S:
            raise _EndedError(*_PAST_DEADLINE)
        code, why = self._port.refusal(answer, None if target is None else target.model)
        if self._errors_end and isinstance(answer, StreamReply):
            raise _EndedError(code, why)
        self.put(stream_error(why, "" if target is None else target.id))

    def _in_sequence(self, target: GrpcTarget | None) -> _Turn:
        """Return the turn of a request in its sequence. Its requests run one after another."""
        if target is None or target.sequence is None:
            return _Turn(None, None, lambda: None)
        key, mine = (target.model, target.sequence.id), asyncio.Event()
        before, self._sequences[key] = self._sequences.get(key), mine

        def forget() -> None:
            if self._sequences.get(key) is mine:
                del self._sequences[key]

        return _Turn(before, mine, forget)

    async def _write(self) -> None:
        while True:
            while self._out:
                message = self._out.popleft()
                await self._context.write(message)
                self._out_bytes -= len(message)
                if 2 * self._out_bytes <= self._buffer_bytes:
                    self._room.set()
            if self._done:
                return
            self._changed.clear()
            await self._changed.wait()


class _EndedError(Exception):
    """Raised if an error ends a client's stream, with the gRPC code and the message."""


class _Turn:
    """A request's turn in its sequence: it waits for the previous request, and lets the next one
    run when it ends. Lifetime: request.
    """

    def __init__(
        self, before: asyncio.Event | None, mine: asyncio.Event | None, forget: Callable[[], None]
    ) -> None:
        self._before, self._mine, self._forget = before, mine, forget

    async def __aenter__(self) -> None:
        if self._before is not None:
            try:
                await self._before.wait()
            except BaseException:
                self._end()
                raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._mine is not None:
            self._mine.set()
        self._forget()


class _Beside:
    """A context manager that runs a task during its block, and cancels it at the end. Lifetime:
    call.
    """

    def __init__(self, what: Any) -> None:
        self._task: asyncio.Task[Any] = asyncio.ensure_future(what)

    async def __aenter__(self) -> asyncio.Task[Any]:
        return self._task

    async def __aexit__(self, *_: object) -> None:
        await _stopped(self._task)


async def _stopped(task: asyncio.Task[Any] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,))


def _refusal(answer: Answer, model: str | None) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC code and the message for an answer that is an error."""
    if isinstance(answer, GrpcReply) and answer.error is not None:
        number, why = answer.error
        return _CODES.get(number, grpc.StatusCode.UNKNOWN), why[:_MESSAGE_CHARS]
    body = answer.body if isinstance(answer, Response | GrpcReply) else b""
    why = error_in(tritons_error(body, model)) or "the request was refused"
    number = STATUS_OF.get(answer.status, grpc.StatusCode.UNKNOWN.value[0])
    return _CODES[number], why[:_MESSAGE_CHARS]


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _metadata(headers: tuple[Header, ...]) -> aio.Metadata:
    """Return the router's own headers as trailing metadata."""
    found = ((name.decode("latin-1").lower(), value) for name, value in headers)
    plain = ((name, value.decode("latin-1")) for name, value in found if value.isascii())
    return aio.Metadata(*((n, v) for n, v in plain if v.isprintable() and n != "content-type"))


def _ignore_status(status: int) -> None:
    """Ignore the status of an answer, because the request was no inference."""
