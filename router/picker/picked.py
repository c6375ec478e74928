"""Routes a request that another data plane sends: the router chooses a worker as for its own
requests, and names it to the data plane.

For an attempt, the data plane takes the place of the relay: it gets the worker's name, and reports
the answer. The answer also shows if the data plane tried another worker of the list or answered by
itself.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import urlsplit

from policies.facts import Arrival
from router.body.paths import OTHER, Path
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.http.errors import ClientError, WorkerError, WorkerErrorKind
from router.http.messages import Request
from router.http.reply import (
    RETRYABLE_STATUSES,
    Header,
    Outcome,
    RelayLimits,
    ReplyHead,
    ReplySink,
    Sends,
    Timeouts,
    UpstreamRequest,
)
from router.keys.key_file import KeyTerms
from router.picker.exchange import DataPlaneReply, Destination, PickerExchange
from router.record.request_record import Attempt
from router.request.carrier import Carrier
from router.request.dialect import Target
from router.request.prompts import Prompt
from router.request.quotas import priority_within
from router.request.service import Service
from router.upstream.meter import Meter

# Shortly before the time for a decision is over, a waiting request is refused, with the time to
# stay away.
_LAST_S, _LAST_SHARE = 0.15, 0.5
_RESOLVED_S = 10.0  # for this long a resolved address is used
_LIMITS = RelayLimits()
# Of a request's connection, which are the data plane's own business.
_OF_CONNECTION = frozenset(
    (
        *(b"host", b"connection", b"content-length", b"transfer-encoding", b"te", b"trailer"),
        *(b"expect", b"upgrade", b"http2-settings", b"keep-alive", b"proxy-connection"),
    )
)
_OBJECTIVES = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
# Kinds of worker errors by Envoy's reason for an answer of its own (docs, "Response Code Details").
_KINDS: tuple[tuple[re.Pattern[str], WorkerErrorKind], ...] = (
    (re.compile("overflow"), "busy"),
    (re.compile("connection_failure|connect_timeout|connection_timeout"), "connect"),
    (re.compile("response_timeout|per_try_timeout|max_duration"), "timeout_first_byte"),
    (re.compile("upstream_reset|connection_termination|remote_reset|protocol"), "early_close"),
)


class Call(Protocol):
    """The connection to the data plane for one request."""

    exchange: PickerExchange

    async def receive(self) -> bool:
        """Wait for the data plane's next message. Return False if the exchange has ended."""

    async def send(self, answers: Iterable[bytes]) -> None:
        """Send messages to the data plane."""

    def decided(self, deadline_s: float | None) -> None:
        """Note that a worker was chosen for the request. Its answer is no longer wanted after
        `deadline_s`.
        """


class PickedHttp(Request):
    """A client's HTTP request that the data plane sends to its worker itself. Lifetime: request."""

    __slots__ = ("call",)

    call: Call

    @property
    def remote(self) -> str | None:
        """The client's address, if the data plane reports it."""
        return host_of(self.call.exchange.client) or self.connection.host or None

    @property
    def peer(self) -> str | None:
        """The data plane's address, or None if it is unknown."""
        return self.connection.host or None

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters of the target, or the model that a route's header names, for a
        request whose body the router does not see.
        """
        for name in ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite"):
            if (model := self.headers.get(name)) is not None:
                return MappingProxyType({"model": model})
        return super().query


def host_of(endpoint: str) -> str:
    """Return the host in an endpoint of the form HOST:PORT."""
    return endpoint.rpartition(":")[0].strip("[]")


@lru_cache(maxsize=4_096)
def _place_of(url: str) -> tuple[str, int, bool]:
    """Return the host and the port in a worker's URL, and whether the host is an IP address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        ip_address(host)
        literal = True
    except ValueError:
        literal = False
    return host, parts.port or (443 if parts.scheme == "https" else 80), literal


class Endpoints:
    """Finds the workers for the addresses that a data plane uses, and the addresses of workers.
    Lifetime: process.
    """

    def __init__(self, fleet: FleetManager, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}  # host -> address, and until when

    async def of(self, member: Member) -> str | None:
        """Return a worker's address as IP:PORT; None if its host name has no IP address."""
        host, port, literal = _place_of(member.spec.url)
        address = host if literal else await self._address(host)
        if address is None:
            return None
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    async def among(self, hint: list[str] | None) -> tuple[int, ...] | None:
        """Return the ids of the workers that a data plane's list of HOST:PORT or HOST allows. For
        None, return None: any worker is allowed.
        """
        if hint is None:
            return None
        wanted = {text.strip("[]") if ip_like(text) else text for text in hint}
        found = []
        for member in list(self._fleet.members.values()):
            endpoint = await self.of(member)
            if endpoint is not None and (endpoint in wanted or host_of(endpoint) in wanted):
                found.append(member.worker_id)
        return tuple(sorted(found))

    async def at(self, endpoint: str) -> tuple[int, ...]:
        """Return the ids of the workers at an address; several workers at one address are ranks of
        one engine.
        """
        return await self.among([endpoint]) or ()

    async def _address(self, host: str) -> str | None:
        known = self._known.get(host)
        now_s = self._clock()
        if known is not None and now_s < known[1]:
            return known[0]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return None if known is None else known[0]
        if len(self._known) >= 4_096:
            self._known.clear()
        address = str(found[0][4][0])
        self._known[host] = address, now_s + _RESOLVED_S
        return address


def ip_like(text: str) -> bool:
    """Return whether the text is an IP address without a port."""
    try:
        ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


class PickedReply:
    """A `ReplySink` that writes nothing, because the data plane sends the answer to the client.
    Lifetime: dispatch.
    """

    movable = False
    dechunk = True
    congested = False
    keep_alive = True
    begun = False  # always False: nothing is written here

    def __init__(self, http: Request) -> None:
        self.status = 200
        self.body_length = 0
        self.aborted = False
        self._http = http

    def head(self, head: ReplyHead) -> None:
        """Keep the status of the answer."""
        self.status = head.status

    def data(self, data: bytes) -> None:
        self.body_length += len(data)
        self._http.written_bytes = self.body_length

    async def drain(self) -> None:
        return

    def finish(self) -> None:
        return

    def abort(self, late: bool = False) -> None:
        self.aborted = True


class PickedCarrier(Carrier):
    """Tells the data plane, a proxy that sends the request itself, which worker to use. Lifetime:
    request.
    """

    __slots__ = (
        *("_among", "_deadline_s", "_endpoints", "_fleet", "_moved_to", "_named", "_terms"),
        *("call", "clock"),
    )

    edits = False  # the data plane writes both bodies
    moves = False  # the data plane writes the answer

    def __init__(
        self,
        service: Service,
        http: PickedHttp,
        endpoints: Endpoints,
        among: tuple[int, ...] | None,
        terms: PickerTerms,
    ) -> None:
        """Make the carrier of the request `http`, which the data plane (a proxy) will send to the
        worker itself.

        `among` has the ids of the workers that may get the request; None if all may.
        """
        super().__init__(http)
        self.call = http.call
        self.clock = service.clock
        self._fleet = service.fleet
        self._endpoints = endpoints
        self._among = among
        self._terms = terms
        self._deadline_s: float | None = None
        self._named = ""  # the endpoint that was given to the data plane
        self._moved_to: int | None = None  # the worker that has it, where another was chosen

    def path(self, target: Target | None) -> Path:
        # Without the body its fields cannot be read.
        return OTHER if self.call.exchange.blind else super().path(target)

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        within_s = self._terms.decision_s
        most_s = within_s - min(_LAST_S, _LAST_SHARE * within_s)
        hold_s = most_s if arrival.hold_s is None else min(arrival.hold_s, most_s)
        self._deadline_s = arrival.deadline_s
        return replace(
            arrival,
            hold_s=hold_s,
            among=self._among,
            priority=arrival.priority or priority_within(key, self._objective()),
            stream=arrival.stream and self.call.exchange.shows_pieces,
        )

    def _objective(self) -> int:
        named = (self.http.headers.get(name) for name in _OBJECTIVES)
        known = (self._terms.priority_of(name) for name in named if name is not None)
        return next((priority for priority in known if priority is not None), 0)

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        return _DataPlane(self, member, attempt, on_answer)

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> PickedReply:
        if headers:
            self.call.exchange.response_sets = headers
        return PickedReply(self.http)

    def rest(self, arrival: Arrival) -> Arrival | None:
        if self._moved_to is None:
            return None
        only, self._moved_to = self._moved_to, None
        return replace(arrival, only=only, among=None, splits=False)

    @property
    def follows(self) -> bool:
        """True if the data plane sent the request to another worker than the chosen one; the
        request counts as that worker's load next.
        """
        return self._moved_to is not None

    # --- what the data plane is told, and tells -------------------------------------------------

    async def name(self, sent: UpstreamRequest, member: Member, attempt: Attempt) -> None:
        """Tell the data plane to which worker it shall send the request. Raises WorkerError if the
        worker has no IP address.
        """
        endpoint = await self._endpoints.of(member)
        if endpoint is None:
            raise WorkerError("connect", f"the host of {member.spec.url} has no address")
        self._named = endpoint
        exchange, wanted = self.call.exchange, [endpoint]
        for other in attempt.decision.candidates[1 : self._terms.endpoints]:
            known = self._fleet.members.get(other.worker_id)
            if known is not None and (one := await self._endpoints.of(known)) is not None:
                wanted.append(one)
        came = {name for name, _ in exchange.headers if not name.startswith(b":")}
        kept = {name.lower() for name, _ in sent.headers}
        kept |= {name for name, _ in sent.internal_headers}  # which replace them
        gone = sorted(name.decode("latin-1") for name in came - kept - _OF_CONNECTION)
        body = None if sent.body is self.http.body else sent.body
        told = Destination(",".join(wanted), sent.internal_headers, tuple(gone), body)
        if exchange.needs_decision:
            await self.call.send(exchange.place(told))
        self.call.decided(self._deadline_s)

    async def wrong_worker_error(self, reply: DataPlaneReply, member: Member) -> WorkerError | None:
        """Return the error with which the attempt ends if another worker than the chosen one
        answered; None if the chosen one did.
        """
        if not reply.served or reply.served == self._named:
            return None
        workers = await self._endpoints.at(reply.served)
        if member.worker_id in workers:
            return None
        terms = self._terms
        if not workers:
            terms.counts["stranger"] += 1
            return WorkerError("moved", f"{reply.served} answered, which is no worker")
        terms.counts["moved"] += 1
        self._moved_to = workers[0]
        tried = reply.attempts is not None and reply.attempts > 1
        why = f"the data plane went on to {reply.served}"
        return WorkerError("connect" if tried else "moved", why)


class PickerTerms:
    """The endpoint picker's limits for all requests. Lifetime: process, replaced on reload."""

    def __init__(
        self,
        decision_s: float,
        endpoints: int,
        objectives: Mapping[str, int],
        found: Callable[[str], int | None],
        counts: Any,
    ) -> None:
        """Set the limits. `found` returns the priority of an objective that is not among the
        configured `objectives`.

        `counts` counts, by a word each, the cases in which a data plane did not do what the router
        told it.
        """
        self.decision_s = decision_s
        self.endpoints = endpoints
        self._objectives = objectives
        self._found = found
        self.counts = counts

    def priority_of(self, objective: str) -> int | None:
        """Return the priority of an objective, from the configuration or else from discovery; None
        if it is unknown.
        """
        configured = self._objectives.get(objective)
        return self._found(objective) if configured is None else configured


class _DataPlane:
    """Sends one request by telling the data plane which worker to use. Lifetime: dispatch."""

    def __init__(
        self,
        carrier: PickedCarrier,
        member: Member,
        attempt: Attempt,
        on_answer: Callable[[], None] | None,
    ) -> None:
        self._carrier = carrier
        self._member = member
        self._attempt = attempt
        self._on_answer = on_answer
        self._clock = carrier.clock

    async def send(
        self,
        request: UpstreamRequest,
        sink: ReplySink,
        timeouts: Timeouts,
        on_first_byte: Callable[[float], None] | None = None,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> Outcome:
        """Let the data plane send the request, and follow the answer, as `Sends` says. The data
        plane decides how long each step may take.
        """
        picked, outcome = self._carrier, Outcome(self._clock())
        call, exchange = picked.call, picked.call.exchange
        if not exchange.placed:
            try:
                await picked.name(request, self._member, self._attempt)
            except WorkerError as error:
                outcome.error = error
                return outcome
        while exchange.reply is None and not exchange.refused:
            if not await call.receive():
                outcome.error, outcome.final = _left(), True
                return outcome
        reply = exchange.reply
        if reply is None:
            outcome.error, outcome.final = _left(), True
            return outcome
        if (elsewhere := await picked.wrong_worker_error(reply, self._member)) is not None:
            outcome.error = elsewhere
            outcome.final = not picked.follows
            return outcome
        outcome.final, outcome.status = True, reply.head.status
        if not reply.by_worker:
            outcome.error = _own_answer(reply)
        elif reply.head.answers and self._on_answer is not None:
            self._on_answer()
        sink.head(reply.head)
        watch = _Watch(request, reply.head, outcome, self._clock, on_first_byte, on_progress)
        return await watch.follow(call, sink)

    def abandon_silent(self) -> None:
        """Do nothing, because the data plane has the request and the router cannot take it back."""

    async def aclose(self) -> None:
        """Do nothing, because the router has no connection to the worker here."""


class _Watch:
    """Follows an answer as the data plane reports it, and measures it. Lifetime: dispatch."""

    def __init__(
        self,
        request: UpstreamRequest,
        head: ReplyHead,
        outcome: Outcome,
        clock: Callable[[], float],
        on_first_byte: Callable[[float], None] | None,
        on_progress: Callable[[float, int], None] | None,
    ) -> None:
        plain = all(
            value.strip().lower() in (b"", b"identity")
            for name, value in head.headers
            if name == b"content-encoding"
        )
        self._meter = (
            Meter(head.event_stream, _LIMITS.tail_bytes, request.mark, request.keeps_ends)
            if plain
            else None
        )
        self._head = head
        self._outcome = outcome
        self._clock = clock
        self._on_first_byte = on_first_byte
        self._on_progress = on_progress
        self._reported_s = float("-inf")
        self._keeps_ends = request.keeps_ends

    async def follow(self, call: Call, sink: ReplySink) -> Outcome:
        """Wait for the answer's end, and return the outcome."""
        exchange, outcome = call.exchange, self._outcome
        while True:
            for piece in exchange.taken():
                self._feed(piece)
                sink.data(piece)
            if exchange.over or exchange.refused or not await call.receive():
                break
        for piece in exchange.taken():
            self._feed(piece)
            sink.data(piece)
        meter = self._meter
        if meter is not None:
            outcome.usage, outcome.events = meter.usage(), meter.events
            if self._keeps_ends:
                outcome.kept = meter.kept
        if outcome.error is None and outcome.status in RETRYABLE_STATUSES:
            outcome.error = self._head.error  # the worker's, even if its client did not wait
        if not exchange.over or exchange.refused:
            outcome.error = outcome.error or _left()
        else:
            sink.finish()
        return outcome

    def _feed(self, piece: bytes) -> None:
        outcome, meter, now_s = self._outcome, self._meter, self._clock()
        outcome.last_byte_s = now_s
        outcome.bytes_to_client += len(piece)
        if outcome.first_byte_s is None:
            outcome.first_byte_s = now_s
        if meter is None:
            return
        meter.feed(piece)
        if outcome.first_token_s is None and meter.begun:
            outcome.first_token_s = now_s
            if self._on_first_byte is not None and self._head.answers:
                self._on_first_byte(now_s)
        elif self._on_progress is not None and now_s - self._reported_s >= _LIMITS.progress_s:
            self._reported_s = now_s
            self._on_progress(now_s, meter.events)


def _left() -> ClientError:
    return ClientError(499, "the client closed its connection", code="client_closed")


def _own_answer(reply: DataPlaneReply) -> WorkerError | ClientError | None:
    """Return the error, a WorkerError or a ClientError, because of which the data plane made an
    answer itself.
    """
    details = reply.details or ""
    for pattern, kind in _KINDS:
        if pattern.search(details):
            return WorkerError(kind, details[:200])
    if reply.head.status < 500:
        return _left()
    return WorkerError("moved", f"nobody got it: {details[:200] or reply.head.status}")
