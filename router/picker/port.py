"""Serves Envoy's external processing protocol: the data plane opens one gRPC stream for each
request.

Requests are handled as at the client port, with the same keys, limits and logs. An error answer of
the router replaces the worker's answer. `exchange.py` has the order of messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
import msgspec
from grpc import aio

from router.config.extras import Picker
from router.core.contract.actions import Reject
from router.http.messages import REFUSALS, Answer, Request, Response, error_response
from router.http.parser import Head, RefusedError, head_of
from router.http.reply import Header
from router.picker.exchange import PickerExchange
from router.picker.messages import PROCESS, SERVICE, TEST_CHOICE, endpoints_of
from router.picker.picked import (
    Endpoints,
    PickedCarrier,
    PickedHttp,
    PickedReply,
    PickerTerms,
)
from router.picker.settings import PickerSettings
from router.record.request_record import DEADLINE
from router.request.dialect import Dialect, Target
from router.request.inference import Inference
from router.request.quotas import objectives_of
from router.request.service import Service
from router.request.state import RequestState
from router.server.client_port import ClientPort
from router.server.grpc_listener import GrpcListener, GrpcPeer, serves

_SERVICES = frozenset({"", SERVICE, "readiness", "inference-extension"})
_LIVENESS = "liveness"
TOO_LATE = "decision_timeout"
_FAIRNESS = (b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id")
_REASON = b"x-llm-d-request-dropped-reason"
# By the code of a refusal: llm-d's word for it.
_DROPPED: Mapping[str, bytes] = MappingProxyType(
    {
        **dict.fromkeys(("hold_timeout", TOO_LATE), b"rejected-ttl-expired"),
        **dict.fromkeys(("no_worker_available", "no_endpoint_in_subset"), b"rejected-no-endpoints"),
        **dict.fromkeys(("shutting_down", "draining"), b"rejected-shutting-down"),
        "displaced": b"evicted-priority",
    }
)
_SATURATED = b"rejected-saturated"

log = logging.getLogger(__name__)


class PickerPort(GrpcListener):
    """Serves the streams of data planes, and answers health checks at a port of its own. Lifetime:
    process.
    """

    def __init__(
        self,
        inference: Inference,
        service: Service,
        dialects: Sequence[Dialect],
        settings: Callable[[], PickerSettings],
        counts: Counter[str],
        found: Callable[[str], int | None],
    ) -> None:
        """Make the port, which does not listen yet.

        `dialects` are the same as for `ClientPort`. `counts` counts how requests end, by a word
        each (`picker_metrics` shows the counts). `found` returns the priority that discovery gives
        an objective, or None.
        """
        self._inference = inference
        self._service = service
        self._picking = settings
        self._counts = counts
        self._found = found
        self._endpoints = Endpoints(service.fleet, service.clock)
        forwards = settings().forwards_unknown_paths
        self._port = ClientPort(self._pick, service, forwards, dialects)
        super().__init__(self._method, self._serves, lambda: settings().port)
        self.probed = GrpcListener(
            lambda method: None, self._serves, lambda: settings().health_port
        )
        self._terms = self.terms_of(settings().picker)

    def terms_of(self, picker: Picker) -> PickerTerms:
        """Return the limits for requests that the configuration section `picker` gives."""
        known = objectives_of(picker.objectives)
        return PickerTerms(picker.decision_s, picker.endpoints, known, self._found, self._counts)

    def settle(self) -> None:
        """Use the limits in the present configuration from now on."""
        self._terms = self.terms_of(self._picking().picker)

    async def listen(self) -> None:
        await super().listen()
        if self._picking().picker.health_port >= 0:
            await self.probed.listen()

    async def aclose(self) -> None:
        await super().aclose()
        await self.probed.aclose()  # probes are answered to the end

    def _method(self, method: str) -> Any:
        """Return the handler for a gRPC method, or None if it is unknown."""
        if method == PROCESS:
            return grpc.stream_stream_rpc_method_handler(self._process)
        return None

    def _serves(self, service: str) -> bool | None:
        """Return whether a gRPC service is ready, for health checks; None if there is no service of
        this name.
        """
        if service == _LIVENESS:
            return not self._service.hangs()
        return serves(self._service) if service in _SERVICES else None

    # --- a stream -----------------------------------------------------------------------------

    async def _process(self, _: object, context: Any) -> None:
        """Serve ExternalProcessor/Process until the stream ends; cancelled if the stream is
        reset.
        """
        exchange = PickerExchange(self._picking().body_bytes)
        call = _Stream(context, exchange, self._service.clock)
        self._counts["open"] += 1
        broken = False
        try:
            await self._request(call)
            if exchange.needs_decision:
                await self._answer(call)
            while await call.receive():  # to its end, whoever it is that counts
                exchange.taken()
        except asyncio.CancelledError:
            raise
        except Exception:
            # A defect of the router: a stream that just ended would look like an empty, complete
            # answer.
            log.exception("failed to pick an endpoint")
            broken = True
            why = "internal error of the router"
            await self._refuse(call, error_response(500, why, "internal_error"))
        finally:
            self._counts["open"] -= 1
            self._counts["broken" if broken else _end_of(exchange)] += 1

    async def _request(self, call: _Stream) -> None:
        """Read messages until a worker must be chosen for the request, or until the
        exchange ends.
        """
        exchange = call.exchange
        while not (exchange.needs_decision or exchange.refused or exchange.reply):
            if not await call.receive():
                return

    async def _answer(self, call: _Stream) -> None:
        """Choose a worker for the request, or refuse it, and follow its answer."""
        exchange = call.exchange
        try:
            http = self._http(call)
        except RefusedError as error:
            self._service.faulty(REFUSALS[error.reason].status)
            answer: Answer = REFUSALS[error.reason].response(0)
        else:
            answer = await self._port.answer(http)
        aborted = isinstance(answer, PickedReply) and answer.aborted
        if isinstance(answer, Response) and exchange.reply is None:
            await self._refuse(call, answer)
        elif exchange.needs_decision or aborted:
            why = "the request's deadline has passed in the middle of its answer"
            await self._refuse(call, error_response(504, why, DEADLINE))

    async def _refuse(self, call: _Stream, answer: Response) -> None:
        """Make the data plane send an error answer of the router in place of a worker's answer."""
        code = _code_of(answer.body)
        headers: list[Header] = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in answer.headers.items()
        ]
        headers.append((b"content-type", answer.content_type.encode()))
        if answer.status in (429, 503):
            headers.append((_REASON, _DROPPED.get(code, _SATURATED)))
        await call.send(
            call.exchange.refuse(answer.status, headers, answer.body, code or f"{answer.status}")
        )

    def _http(self, call: _Stream) -> PickedHttp:
        """Return the request as if the client had sent it to the router by HTTP. Raises
        RefusedError if it is not valid.
        """
        exchange, peer = call.exchange, GrpcPeer(call.context.peer())
        head = self._head(exchange.headers)
        http = PickedHttp(peer, head, exchange.body)  # type: ignore[arg-type]
        http.call = call
        return http

    def _head(self, headers: list[Header]) -> Head:
        """Parse the request's headers by the grammar of HTTP/1.1, which is stricter than the data
        plane's.
        """
        named = {name: value for name, value in headers if name.startswith(b":")}
        pairs = [one for one in headers if one[0] not in named and one[0] not in _FRAMING]
        tenant, names = self._picking().tenant_header.encode(), dict(pairs)
        if tenant not in names:
            pairs += [(tenant, names[name]) for name in _FAIRNESS if name in names][:1]
        method, path = named.get(b":method", b"GET"), named.get(b":path", b"/")
        lines = [b"%b %b HTTP/1.1" % (method, path)]
        lines.append(b"host: " + (named.get(b":authority") or b"-"))
        lines += [b"%b: %b" % pair for pair in pairs]
        text = b"\r\n".join(lines)
        ends = len(lines) - 1  # else a value has some of its own
        if text.count(b"\r") != ends or text.count(b"\n") != ends:
            raise RefusedError("bad_header")
        return head_of(text + b"\r\n\r\n", False)

    async def _pick(self, http: Request, target: Target | None = None) -> Answer:
        """Handle the request as `Inference.handle` does, but stop if no worker is chosen within the
        time limit for a decision.
        """
        assert isinstance(http, PickedHttp), "made here"
        call, terms, service = http.call, self._terms, self._service
        assert isinstance(call, _Stream), "made here"
        among = await self._endpoints.among(self._hint(http, call.exchange))
        carrier = PickedCarrier(service, http, self._endpoints, among, terms)
        with self._inference.begin(http, carrier) as state:
            try:
                async with asyncio.timeout(terms.decision_s) as limit:
                    call.limit = limit
                    seen = None if call.exchange.blind else target
                    return await self._inference.answer(state, seen)
            except TimeoutError:
                if not limit.expired():
                    raise
                return self._too_late(state)

    def _too_late(self, state: RequestState) -> Answer:
        """Reject a request for which no worker was chosen in time, and return the error answer."""
        core = self._service.dispatcher.core
        settings = core.settings
        if state.ticket.is_open:
            state.ticket.fail("client", retry=False, reason=TOO_LATE)
        core.counters.rejected(TOO_LATE)
        why = f"no decision within {self._terms.decision_s:g} s"
        reject = Reject(state.ticket.request_id, 503, TOO_LATE, why, settings.retry_after_s)
        state.account.refused(reject, 503)
        answer = error_response(503, why, TOO_LATE)
        answer.headers["Retry-After"] = str(max(round(settings.retry_after_s), 1))
        return state.account.answered(answer, state.attempts)

    def _hint(self, http: Request, exchange: PickerExchange) -> list[str] | None:
        """Return the endpoints to which the data plane allows the request to be sent; None if it
        allows any.
        """
        if not self._picking().picker.conformance:
            return exchange.subset
        exchange.tells_served = True
        chosen = http.headers.get(TEST_CHOICE)
        return exchange.subset if chosen is None else endpoints_of([chosen])


_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})


class _Stream:
    """The gRPC stream of the data plane for one request. Lifetime: call."""

    def __init__(self, context: Any, exchange: PickerExchange, clock: Callable[[], float]) -> None:
        self.context = context
        self.deadline_s = math.inf  # a request that still waits then is cancelled, too
        self._clock = clock
        self.exchange = exchange
        self.limit: asyncio.Timeout | None = None  # of the decision
        self._closed = False  # the data plane sends nothing more

    async def receive(self) -> bool:
        message = aio.EOF if self._closed else await self._read()
        if message is aio.EOF:
            self._closed = True
            self.exchange.closed()
            return False
        await self.send(self.exchange.feed(message))
        return True

    async def _read(self) -> Any:
        """Return the data plane's next message, or EOF at the end of the stream if the answer has
        ended.

        If the answer's body is not shown, Envoy (1.40) resets the stream at the answer's end as it
        does when its client leaves, and gRPC may report either as a plain end. All of these count
        as the end of the answer.
        """
        try:
            return await self.context.read()
        except asyncio.CancelledError:
            if not self._ended():
                raise
            return aio.EOF

    def _ended(self) -> bool:
        """Return whether the stream was cancelled only because the answer has ended."""
        task, exchange = asyncio.current_task(), self.exchange
        unseen = exchange.reply is not None and not exchange.shows_body
        if task is None or not unseen or self._clock() >= self.deadline_s:
            return False
        task.uncancel()
        self._closed = True
        exchange.closed()
        return True

    async def send(self, answers: Iterable[bytes]) -> None:
        try:
            for answer in answers:
                await self.context.write(answer)
        except asyncio.CancelledError:
            if not self._ended():
                raise

    def decided(self, deadline_s: float | None) -> None:
        if deadline_s is not None:
            self.deadline_s = deadline_s
        if self.limit is not None:
            self.limit.reschedule(None)


class _Code(msgspec.Struct):
    code: str | None = None


class _AnsweredError(msgspec.Struct):
    error: _Code | str | None = None


_REFUSAL = msgspec.json.Decoder(_AnsweredError)


def _code_of(body: bytes) -> str:
    """Return the code in an error's body; "" if it has none."""
    try:
        error = _REFUSAL.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return (error.code or "") if isinstance(error, _Code) else ""


def _end_of(exchange: PickerExchange) -> str:
    """Return how a request ended, as the word under which it is counted."""
    if exchange.idle:
        return "watched"
    if exchange.refused:
        return "refused"
    if exchange.placed:
        return "placed" if exchange.over else "left"
    return "unasked" if exchange.reply is not None else "left"
