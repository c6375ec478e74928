"""The attempts at one request: ask the core, send, relay; on a failure ask for another worker.

Everything that happens to a request after it was read and understood, up to its answer's last
byte, and how long that may take. A client's deadline comes in a header of a name of its own or in
the one that Envoy sets for the services behind it (`x-envoy-expected-rq-timeout-ms`: Envoy 1.31,
"Router", HTTP headers to upstreams).
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import coroutine
from typing import Any

import msgspec

from kvkernels import AnswerDue
from router.body.legs import RELEASE, TRY_BITS, Handover, Leg, Transfer, Try
from router.body.paths import OwnAnswers
from router.body.scan import LONG_BYTES
from router.core.contract.actions import Reject
from router.engines.table import TRANSFERS
from router.engines.triton import says_busy, says_unreadable
from router.fleet.member import Member
from router.http.bodies import Body, follow
from router.http.errors import ClientError, WorkerError
from router.http.messages import Answer, Response, error_response
from router.http.reply import (
    HeldReply,
    Outcome,
    RelayLimits,
    ReplyHead,
    ReplySink,
    Sends,
    Timeouts,
    UpstreamRequest,
)
from router.record.explain import EXPLAIN_HEADER
from router.record.request_record import DEADLINE, Attempt
from router.request.denials import denies_model
from router.request.moving import Movers, MovingStream
from router.request.quotas import told_on
from router.request.request import InferenceRequest, Whose
from router.request.token_ids import with_token_ids
from router.upstream.client_reply import ClientReply, Reply, upstream_request
from router.upstream.collected_reply import CollectedReply

ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
CODE = DEADLINE
_FIRST_LEG_BYTES = 4 << 20  # its answer; parameters of a million tokens take half of that
# After these errors a worker may have answered all the same.
_UNREAD = frozenset(
    {"early_close", "timeout_send", "timeout_first_byte", "timeout_between", "garbage"}
)
_RELEASE_BYTES = 1 << 16  # of the answer to one
_RELEASES_AT_ONCE = 32  # to one worker
_MOST_RELEASES = 16_384  # of one worker; the KV of more is kept as long as its worker keeps it
_RELEASE_S = 30.0  # of a call; after so long a lease of our engine ends by itself
_MOST_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Lifetime: process, replaced on reload."""

    deadline_header: str = "x-request-timeout-ms"
    ms_per_token: float = 0.0  # added to the wait for a first byte, per uncached prompt token
    whole_answer_s: float = 600.0  # the same wait where an answer does not stream
    total_s: float = 0.0  # for any request, whatever its client says; 0: no bound

    def deadline_s(self, header: Callable[[str], str | None], now_s: float) -> float | None:
        """When nobody wants the answer any more; None: whenever. Raises ClientError."""
        left_s = [
            _seconds(name, text)
            for name in (self.deadline_header, ENVOY_HEADER)
            if (text := header(name)) is not None
        ]
        known_s = [one_s for one_s in (*left_s, self.total_s) if one_s]
        return now_s + min(known_s) if known_s else None

    def timeouts(self, timeouts: Timeouts, stream: bool, uncached_tokens: int) -> Timeouts:
        """The bounds of one attempt, the prompt's length considered."""
        first_s = timeouts.first_byte_s if stream else self.whole_answer_s
        if first_s == timeouts.first_byte_s and not self.ms_per_token:
            return timeouts
        return replace(timeouts, first_byte_s=first_s + uncached_tokens * self.ms_per_token / 1e3)

    def passed_on(self, request: UpstreamRequest, left_s: float) -> UpstreamRequest:
        """The request with what is left of the time in the place of what there was."""
        name = self.deadline_header.encode()
        ours = (name, ENVOY_HEADER.encode())
        headers = tuple(h for h in request.headers if h[0].lower() not in ours)
        told = (name, b"%d" % max(int(left_s * 1e3), 1))
        return replace(request, headers=headers, internal_headers=(*request.internal_headers, told))


async def in_time(
    sending: Coroutine[Any, Any, Outcome],
    reply: Reply,
    deadline_s: float,
    clock: Callable[[], float],
    sink: ReplySink | None = None,
) -> Outcome:
    """What became of an attempt; one that is not over by its deadline is cancelled.

    An answer that has begun by then is cut off, so that it cannot look whole. `sink`: what it
    comes through to `reply`, if anything.
    """
    started_s = clock()
    try:
        async with asyncio.timeout(deadline_s - started_s):
            return await sending
    except TimeoutError:
        begun_bytes = reply.body_length
        if begun_bytes:
            (sink or reply).abort(late=True)
        error = ClientError(408, "the request's deadline has passed", code=CODE)
        return Outcome(started_s=started_s, error=error, bytes_to_client=begun_bytes)


def ran_out(outcome: Outcome) -> bool:
    """Whether the deadline ended an attempt."""
    return isinstance(outcome.error, ClientError) and outcome.error.code == CODE


def late_answer(reply: Reply) -> Answer:
    """The answer to a client whose deadline has passed: `reply` where that has begun."""
    if reply.body_length:
        return reply
    message = "the request's deadline passed before an answer began"
    return error_response(504, message, CODE)


def _seconds(name: str, text: str) -> float:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) <= _MOST_MS):
        raise ClientError(400, f"{name} must be milliseconds, 0..{_MOST_MS}; 0: no deadline", name)
    return int(text) / 1e3


@coroutine
def cohort() -> Generator[None]:
    """End a stage: wait until the others of this turn have come as far."""
    yield


_STATUSES = frozenset({404, 405, 501})
_READ_BYTES = 16_384  # a longer answer is no "not found"
_FRAMING = RelayLimits()
# What servers say of a path that they have not got: Starlette, which vLLM, SGLang, TensorRT-LLM and
# Triton's frontend run on, for 404 and 405; our own engine by the beginning of its message.
_DETAILS = frozenset({"Not Found", "Method Not Allowed"})
_OURS = "no such path: "
_LLAMA_CPP = "File Not Found"


class _Error(msgspec.Struct):
    message: str = ""


class _Denial(msgspec.Struct):
    detail: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error | str | None = None


_DENIAL = msgspec.json.Decoder(_Denial)


class Sieve:
    """A `ReplySink` before the client's: it keeps back what says that there is no such path.

    Lifetime: one dispatch.
    """

    def __init__(
        self,
        reply: ReplySink,
        answers: OwnAnswers | None = None,
        escaped: bool = False,
        model: str = "",
    ) -> None:
        """`model`: that the request is for. `answers`: as of `Path`; 400 may then mean that a queue
        is full, and that of another worker is not. `escaped`: the target has escapes, which some
        servers leave as they are: not found is then the target.
        """
        self._reply = reply
        self._model = model
        self._escaped = escaped
        self._answers = answers
        self._events: Body | None = None  # of a stream that it may end, as far as they have come
        self._events_end = b"\n\n"
        self._kept = _STATUSES if answers is None else _STATUSES | {400}
        self._head: ReplyHead | None = None  # kept back
        self._body: Body
        self._data: list[bytes] = []
        self._payload: list[bytes] = []
        self._read_bytes = 0
        self._absent = False
        self._broken = False  # it ended before it was understood
        self._busy: HeldReply | None = None  # what it said in place of an answer
        self._denial: HeldReply | None = None  # the same, of the model

    @property
    def movable(self) -> bool:
        return self._reply.movable

    @property
    def dechunk(self) -> bool:
        return self._reply.dechunk

    @property
    def congested(self) -> bool:
        return self._reply.congested

    def head(self, head: ReplyHead) -> None:
        """As of `ReplySink`, and so are the others."""
        if head.status in self._kept:
            self._head = head
            self._body = follow(head, _FRAMING)
            return
        if self._answers is not None and head.event_stream and not self.dechunk:
            self._events = follow(head, _FRAMING)
        self._reply.head(head)

    def data(self, data: bytes) -> None:
        if self._head is None:
            if self._events is not None:
                self._events_end = (self._events_end + self._events.feed(data))[-2:]
            self._reply.data(data)
            return
        self._data.append(data)
        self._payload.append(data if self.dechunk else self._body.feed(data))
        self._read_bytes += len(data)
        if self._read_bytes > _READ_BYTES:
            head, self._head = self._head, None
            self._reply.head(head)
            self._reply.data(b"".join(self._data))

    async def drain(self) -> None:
        await self._reply.drain()

    def finish(self) -> None:
        if self._head is None:
            self._reply.finish()
            return
        body = b"".join(self._payload)
        held = HeldReply(self._head, body)
        if self._head.status in _STATUSES and not self._escaped:
            self._absent = says_absent(self._head.status, body)
        if says_busy(self._head.status, body):
            self._busy = held
        elif denies_model(self._head.status, body, self._model):  # by gRPC
            self._denial = held
        elif not self._absent:
            held.deliver(self._reply)

    def abort(self, late: bool = False) -> None:
        """End the answer as broken. A stream of events gets a last event that says so, if its
        protocol has one and the events before it are whole.
        """
        if self._head is not None:
            self._broken = True
        elif self._answers is None or not self._whole_events:
            self._reply.abort(late)
        else:
            self._reply.data(self._answers.last_event(late))
            self._reply.finish()

    @property
    def _whole_events(self) -> bool:
        """The client has whole events in whole chunks."""
        events = self._events
        return events is not None and events.between_chunks and self._events_end == b"\n\n"

    def judged(self, outcome: Outcome) -> Outcome:
        """What became of the dispatch, as far as the client is concerned."""
        if self._absent:
            error = WorkerError("absent", "the worker has not got this path")
            return replace(outcome, error=error, bytes_to_client=0)
        if self._denial is not None:
            return replace(outcome, error=_no_model(), bytes_to_client=0, held=self._denial)
        if self._busy is not None:
            error = WorkerError("busy", "its queue is full", 0.0)
            return replace(outcome, error=error, bytes_to_client=0, held=self._busy)
        return replace(outcome, bytes_to_client=0) if self._broken else outcome


def passed_on(outcome: Outcome, sink: ReplySink, model: str) -> Outcome:
    """What became of a dispatch: of a refusal that the relay kept, whether it is about the model;
    any other one goes to `sink`, as it came.
    """
    held = outcome.held
    if outcome.error is not None or held is None:
        return outcome
    if denies_model(held.head.status, held.body, model):
        return replace(outcome, error=_no_model())
    held.deliver(sink)
    return replace(outcome, held=None, bytes_to_client=len(held.body))


def collected_of(outcome: Outcome, collected: CollectedReply, model: str) -> Outcome:
    """The same of a first leg, whose refusals the relay's thread keeps in `collected`."""
    outcome = passed_on(outcome, collected, model)
    refusal = None if outcome.error is not None or outcome.answers else collected.held
    if refusal is not None and denies_model(refusal.head.status, refusal.body, model):
        return replace(outcome, error=_no_model(), held=refusal)
    return outcome


async def _first_leg(
    request: InferenceRequest, sending: Coroutine[Any, Any, Outcome], collected: CollectedReply
) -> Outcome:
    return collected_of(await sending, collected, request.arrival.model)


def _no_model() -> WorkerError:
    return WorkerError("no_model", "the worker says that it has not got the model")


def _denies(outcome: Outcome) -> bool:
    return isinstance(outcome.error, WorkerError) and outcome.error.kind == "no_model"


_FULL_BYTES = 4_096  # a longer error of a worker is not looked at
# How engines word in JSON that they have no room (SGLang: "The request queue is full."; TGI: "Model
# is overloaded"; llama.cpp: "no slot available"; Dynamo: "All workers are busy").
_FULL = re.compile(
    rb"queue (?:is )?full|overloaded|too many requests|rate limit|no slots? |(?:is|are) busy", re.I
)


def says_full(status: int, body: bytes) -> bool:
    """Whether an error of a worker that names no time to come back means that it has no room."""
    if status == 503 and len(body) <= _FULL_BYTES and body.lstrip()[:1] == b"{":
        return _FULL.search(body) is not None or says_busy(status, body)
    return says_busy(status, body)


def says_absent(status: int, body: bytes) -> bool:
    """Whether an answer of 404, 405 or 501 means the path, and not the model or something else
    that the request names.
    """
    if not body or (status != 404 and not body.startswith(b'{"error":"')):
        return True
    try:
        denial = _DENIAL.decode(body)
        detail = msgspec.json.decode(denial.detail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # a page for people, of a server that knows nothing of the API
    if isinstance(denial.error, str):  # Triton's
        return denial.error == "Not Found"
    if isinstance(denial.error, _Error):
        return denial.error.message.startswith((_OURS, _LLAMA_CPP))
    return isinstance(detail, str) and detail in _DETAILS


_UNCHANGED_EVERY = 64  # requests: one goes as text where ids are forwarded, to be checked


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """Bounds and times of the attempts at a request. Lifetime: process, replaced on reload."""

    timeouts: Timeouts
    client_buffer_bytes: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    tenant_header: str = "x-tenant"  # in which workers are told whose a request is
    forward_token_ids: bool = False  # workers that take ids get them instead of text
    transfers: Mapping[str, Transfer] = field(default_factory=lambda: TRANSFERS)  # by kind


class Attempts:
    """Carries requests to workers, one after the other where they fail. Lifetime: process."""

    def __init__(
        self,
        terms: AttemptTerms,
        keep_authorization: bool,
        movers: Movers | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`keep_authorization`: False where clients' keys are this router's own business.
        `movers`: None where no stream goes on at another worker.
        """
        self.terms = terms
        self._clock = clock  # that deadlines are told by
        self._draw = draw  # so many random bits
        self._keep_authorization = keep_authorization
        self._releases = Releases()
        self.movers = movers

    def renew(self, terms: AttemptTerms, movers: Movers | None) -> None:
        """Try requests by these from now on."""
        self.terms, self.movers = terms, movers

    async def answer(self, request: InferenceRequest) -> Answer:
        """The answer of the first worker that gives one, or the refusal."""
        arrival = request.arrival
        with FirstLeg(self._releases) as first:
            if self.movers is None or not (request.moves and arrival.stream):
                return await self._answer(request, None, first)
            read = (arrival, request.prompt.encoded)
            with self.movers.stream(request.body, request.http.path, *read) as stream:
                return await self._answer(request, stream, first)

    async def _answer(
        self, request: InferenceRequest, stream: MovingStream | None, first: FirstLeg
    ) -> Answer:
        held: HeldReply | None = None
        while True:
            attempt = await request.next_attempt()
            await cohort()
            if isinstance(attempt, Reject):
                if stream is not None and stream.begun:  # too late for an answer of its own
                    request.turned_away(attempt, 200, begun=True)
                    return stream.give_up("refused")
                return self._refused(request, attempt, held)
            if stream is not None:
                stream.placed(attempt.uncached_tokens)
            if attempt.wait_s:
                await asyncio.sleep(attempt.wait_s)
            if (member := request.member(attempt)) is None:
                request.gone()
                continue
            terms = self.terms
            if attempt.leg == "prefill":
                if (answer := await self._prefill(request, attempt, member, first)) is not None:
                    return answer
                continue
            headers = request.headers(attempt)
            reply = request.reply(terms.client_buffer_bytes, headers)
            if stream is not None:
                assert isinstance(reply, ClientReply), "only streams over HTTP move"
                if not stream.take(member.kind, reply):
                    request.gone()
                    continue
            whose: Whose = "answer"
            if request.beside is not None:
                end = await self._together(request, attempt, member, reply, stream, terms)
                if end is None:
                    request.gone("prefill")
                    continue
                outcome, own_tokens, whose = end
            else:
                leg = Leg(request.body)
                if attempt.leg == "decode":
                    leg = await _edited(first.second, request.body)
                elif first.second is not Leg:  # one worker does all of it now
                    first.failed(unread=True)
                outcome, own_tokens = await self._attempt(
                    request, leg, attempt, member, reply, stream, terms
                )
            if outcome.error is None or outcome.bytes_to_client:
                first.read()
            held = outcome.held or held
            rest = stream.rest() if stream is not None and outcome.resumable else None
            if not request.ended(outcome, own_tokens, rest, whose):
                shown = reply if stream is None else stream.reply
                return late_answer(shown) if ran_out(outcome) else shown

    async def _prefill(
        self, request: InferenceRequest, attempt: Attempt, member: Member, first: FirstLeg
    ) -> Answer | None:
        """The first leg: what its client gets where the request ends there."""
        arrival, collected, terms = request.arrival, CollectedReply(_FIRST_LEG_BYTES), self.terms
        transfer, told = terms.transfers[member.transfer], Handover()
        of = Try(self._draw(TRY_BITS), request.path.path, arrival.stream)
        leg = await _edited(partial(transfer.prefill, of=of), request.body)
        sent = self._upstream_request(request, leg, attempt, member, terms)
        timeouts = terms.deadlines.timeouts(terms.timeouts, False, attempt.uncached_tokens)
        sending = request.upstream(member).send(sent, collected, timeouts)
        first.sent(member, leg.unread, terms.timeouts)
        reply = request.reply(terms.client_buffer_bytes, request.headers(attempt))
        if arrival.deadline_s is not None:
            sending = in_time(sending, reply, arrival.deadline_s, self._clock)
        outcome = collected_of(await sending, collected, arrival.model)
        if outcome.error is None and not collected.whole:
            error = WorkerError("garbage", "the answer to a first leg is too large")
            outcome = replace(outcome, error=error)
        if outcome.error is None and outcome.answers:
            try:
                told = transfer.read(collected.body, of)
            except WorkerError as error:
                outcome = replace(outcome, error=error)
        if outcome.error is None and outcome.answers and told.reply is None:
            second = partial(transfer.decode, told=told.told, of=of)
            first.ended(second, told.release)
            request.first_leg_ended(outcome)
            return None
        first.failed(unread=_unread(outcome))
        # Of what it answered its client has seen nothing.
        if request.ended(replace(outcome, bytes_to_client=0), None):
            return None
        if ran_out(outcome):
            return late_answer(reply)
        if (held := told.reply or collected.held or outcome.held) is not None:
            held.deliver(reply)
        return reply

    def _upstream_request(
        self,
        request: InferenceRequest,
        leg: Leg,
        attempt: Attempt,
        member: Member,
        terms: AttemptTerms,
        due: AnswerDue | None = None,
    ) -> UpstreamRequest:
        """What a worker is sent: the client's headers, ours, and what its leg is. `due`: what its
        answer has to be, where that goes to the client.
        """
        arrival = request.arrival
        sent = upstream_request(
            request.http,
            leg.body,
            () if attempt.leg == "both" else (*request.leg_headers(), *leg.headers),
            keep_authorization=self._keep_authorization,
            rank=member.rank,
            trace=request.trace,
            due=due,
        )
        sent = told_on(sent, terms.tenant_header, arrival.tenant)
        if arrival.deadline_s is not None:
            sent = terms.deadlines.passed_on(sent, arrival.deadline_s - self._clock())
        return sent

    async def _attempt(
        self,
        request: InferenceRequest,
        leg: Leg,
        attempt: Attempt,
        member: Member,
        reply: Reply,
        stream: MovingStream | None,
        terms: AttemptTerms,
        begun: Callable[[float], None] | None = None,
    ) -> tuple[Outcome, int | None]:
        """What became of the request at one worker, and our count of its prompt's tokens.

        `leg`: what it would be sent as text. `begun` is told of the answer's first byte.
        """
        arrival, given, body = request.arrival, leg.body, leg.body
        if terms.forward_token_ids and request.path.reads == "openai" and begun is None:
            if len(body) < LONG_BYTES:
                body = _body_for(member, request, given)
            else:
                body = await asyncio.to_thread(_body_for, member, request, given)
        leg = replace(leg, body=body)
        due = request.path.due(arrival.max_output_tokens)
        sent = self._upstream_request(request, leg, attempt, member, terms, due)
        sieve = None
        if arrival.needs is not None:
            answers = request.path.answers
            sent = replace(sent, mark=request.path.mark, keeps_ends=answers is not None)
            escaped = "%" in sent.target.partition("?")[0]
            sieve = Sieve(stream or reply, answers, escaped, arrival.model)
        sending = request.upstream(member).send(
            sent if stream is None else stream.request(sent),
            sieve or stream or reply,
            terms.deadlines.timeouts(terms.timeouts, arrival.stream, attempt.uncached_tokens),
            begun or (request.first_token if arrival.stream else None),
            request.progress if arrival.stream else None,
        )
        if arrival.deadline_s is not None:
            # What moves says nothing of an abort before it has ended: its client's reply is cut.
            cut, through = (reply, sieve) if stream is None else (stream.reply, None)
            sending = in_time(sending, cut, arrival.deadline_s, self._clock, through)
        outcome = passed_on(await sending, sieve or stream or reply, arrival.model)
        if stream is not None:
            outcome = stream.ended(outcome)
        if sieve is not None:
            outcome = sieve.judged(outcome)
        held = None if stream is not None or _denies(outcome) else outcome.held
        if held is not None and says_full(held.head.status, held.body):
            error = WorkerError("busy", "its queue is full", 0.0)
            return replace(outcome, error=error), None
        if held is not None and says_unreadable(member.kind, held.head.status, held.body):
            held.deliver(reply)  # no other worker could read it either
            return replace(outcome, error=None, held=None), None
        exact = sieve is None and body is given and request.prompt.encoded
        return outcome, request.prompt.tokens if exact else None

    async def _together(
        self,
        request: InferenceRequest,
        attempt: Attempt,
        member: Member,
        reply: Reply,
        stream: MovingStream | None,
        terms: AttemptTerms,
    ) -> tuple[Outcome, int | None, Whose] | None:
        """Both legs at once: the outcome that counts, as of `_attempt`, and whose it is. The other
        leg is over then, too. None: the worker that was to prefill is gone.
        """
        first, transfer = request.beside, terms.transfers[member.transfer]
        assert first is not None, "of two legs"
        other = request.member(first)
        door = None if other is None or other.recognized is None else other.recognized.door
        if other is None or door is None:
            return None
        of = Try(
            *(self._draw(TRY_BITS), request.path.path, request.arrival.stream),
            *(door, member.rank),
        )
        leg = await _edited(partial(transfer.prefill, of=of), request.body)
        second = await _edited(partial(transfer.decode, told=None, of=of), request.body)
        collected = CollectedReply(_FIRST_LEG_BYTES)
        sent = self._upstream_request(request, leg, first, other, terms)
        # Its answer may come as late as the other's.
        timeouts = terms.deadlines.timeouts(terms.timeouts, False, first.uncached_tokens)
        timeouts = replace(
            timeouts, first_byte_s=max(timeouts.first_byte_s, terms.timeouts.first_byte_s)
        )
        both = TwoLegs(request, transfer, collected, reply)
        both.begin(
            _first_leg(request, request.upstream(other).send(sent, collected, timeouts), collected),
            self._attempt(request, second, attempt, member, reply, stream, terms, both.begun),
        )
        return await both.end()

    def _refused(self, request: InferenceRequest, reject: Reject, held: HeldReply | None) -> Answer:
        """The core's refusal, explained where the client asked why."""
        answer = self._refusal(request, reject, held)
        if isinstance(answer, Response) and (line := request.why_refused(reject)) is not None:
            answer.headers[EXPLAIN_HEADER] = line
        request.turned_away(reject, answer.status)
        return answer

    def _refusal(self, request: InferenceRequest, reject: Reject, held: HeldReply | None) -> Answer:
        """A refusal's answer; where workers did answer with an error, the last of these."""
        if held is not None and reject.code in _SAID_BY_WORKERS:
            reply = request.reply(self.terms.client_buffer_bytes)
            held.deliver(reply)
            return reply
        answer = error_response(reject.status, reject.message, reject.code)
        if reject.retry_after_s is not None:
            answer.headers["Retry-After"] = str(max(math.ceil(reject.retry_after_s), 1))
        return answer


def _unread(outcome: Outcome) -> bool:
    """Whether a worker may have answered a first leg though its answer did not come."""
    error = outcome.error
    return isinstance(error, ClientError) or (error is not None and error.kind in _UNREAD)


class Releases:
    """What workers are told of KV that nobody will read, a few calls at a time. Lifetime: process.

    Where a call fails the lease of the KV ends as always.
    """

    def __init__(self) -> None:
        self._waiting: dict[Sends, deque[tuple[Leg, Timeouts]]] = {}  # by worker
        self._tasks: dict[Sends, set[asyncio.Task[None] | None]] = {}

    def add(self, upstream: Sends, leg: Leg, timeouts: Timeouts) -> None:
        """Tell a worker soon."""
        waiting = self._waiting.setdefault(upstream, deque(maxlen=_MOST_RELEASES))
        waiting.append((leg, replace(timeouts, first_byte_s=_RELEASE_S)))
        tasks = self._tasks.setdefault(upstream, set())
        if len(tasks) < _RELEASES_AT_ONCE:
            tasks.add(asyncio.create_task(self._tell(upstream, waiting)))

    async def _tell(self, upstream: Sends, waiting: deque[tuple[Leg, Timeouts]]) -> None:
        try:
            while waiting:
                leg, timeouts = waiting.popleft()
                headers = ((b"Content-Type", b"application/json"),)
                sent = UpstreamRequest("POST", RELEASE, headers, leg.body)
                await upstream.send(sent, CollectedReply(_RELEASE_BYTES), timeouts)
        finally:  # in the turn that found nothing more: what comes next gets a task of its own
            self._tasks[upstream].discard(asyncio.current_task())
            if not self._tasks[upstream]:
                del self._tasks[upstream], self._waiting[upstream]


# Refusals of the core in whose place the client gets what a worker said.
_SAID_BY_WORKERS = frozenset({"worker_error", "retry_budget_exhausted", "model_not_found"})


class FirstLeg:
    """What a worker keeps for the second leg; given back where none reads it. Lifetime: request."""

    __slots__ = ("_release", "_releases", "_timeouts", "_upstream", "second")

    def __init__(self, releases: Releases) -> None:
        self.second: Callable[[bytes], Leg] = Leg  # makes the second leg
        self._release: Leg | None = None  # what its worker is told where nobody reads its KV
        self._upstream: Sends
        self._timeouts: Timeouts
        self._releases = releases

    def sent(self, member: Member, unread: Leg | None, timeouts: Timeouts) -> None:
        """A worker may keep KV from now on, whether or not its answer is read; what an earlier
        one left nobody will read.
        """
        self._give_back()
        self._upstream, self._timeouts = member.upstream, timeouts
        self._release = unread

    def ended(self, second: Callable[[bytes], Leg], release: Leg | None) -> None:
        """There is KV, which its worker names in its answer."""
        self.second, self._release = second, release

    def failed(self, *, unread: bool) -> None:
        """No second leg follows; `unread`: its worker may keep KV all the same."""
        if not unread:
            self._release = None
        self._give_back()

    def read(self) -> None:
        """The second leg answers: it has the KV, or does without."""
        self._release = None

    def __enter__(self) -> FirstLeg:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            self._releases.add(self._upstream, release, self._timeouts)


_LATE_S = 0.2  # for the end of a prefill after that of the whole answer
# Of an error's text: KV did not pass, and either worker may be why (SGLang, vLLM).
_OF_PAIRS = re.compile(rb"bootstrap|handshake|transfer", re.IGNORECASE)
_OF_WAITS = re.compile(rb"time(?:d[ _-]?|[ _-]?)out", re.IGNORECASE)
Answered = tuple[Outcome, int | None]


class TwoLegs:
    """A prefill and an answer that were begun at once. Lifetime: one try.

    Where one of them fails the other is stopped, at once: it would wait for minutes. Once the
    answer has begun, its KV is there, and what becomes of the prefill only counts.
    """

    def __init__(
        self,
        request: InferenceRequest,
        transfer: Transfer,
        collected: CollectedReply,
        reply: Reply,
    ) -> None:
        self._request = request
        self._transfer = transfer
        self._collected = collected
        self._reply = reply
        self._has_begun = False
        self._prefill: asyncio.Task[Outcome]
        self._answer: asyncio.Task[Answered]

    def begin(
        self, prefill: Coroutine[Any, Any, Outcome], answer: Coroutine[Any, Any, Answered]
    ) -> None:
        """Send both."""
        self._prefill = asyncio.create_task(prefill)
        self._answer = asyncio.create_task(answer)

    def begun(self, now_s: float) -> None:
        """The answer's first byte came."""
        self._has_begun = True
        if self._request.arrival.stream:
            self._request.first_token(now_s)

    async def end(self) -> tuple[Outcome, int | None, Whose]:
        """The outcome that counts, our count of the prompt's tokens, and whose outcome it is.

        A client that leaves when that is known changes nothing but that nobody is asked again.
        """
        try:
            end = await self._first_end()
        except asyncio.CancelledError:  # its client left; or was left, for the answer is over
            if (answered := await _stopped(self._answer)) is None or answered[0].retryable:
                raise
            end = self._answered(*answered)
        finally:
            has_left = await _both_stopped(self._prefill, self._answer)
        if has_left and end[0].retryable:
            raise asyncio.CancelledError
        return end

    async def _first_end(self) -> tuple[Outcome, int | None, Whose]:
        await asyncio.wait((self._prefill, self._answer), return_when=asyncio.FIRST_COMPLETED)
        if self._prefill.done() and not self._answer.done():
            return await self._prefilled(self._prefill.result())
        if self._answer.result()[0].error is None:
            await asyncio.wait((self._prefill,), timeout=_LATE_S)
        return self._answered(*self._answer.result())

    async def _prefilled(self, outcome: Outcome) -> tuple[Outcome, int | None, Whose]:
        """The prefill is over, and the answer is not."""
        if self._has_begun or (outcome.error is None and outcome.answers):
            self._request.beside_ended(outcome)
            return self._answered(*await self._answer)
        if (answered := await _stopped(self._answer)) is not None:
            return self._answered(*answered)
        if self._reply.begun:  # its first bytes went out meanwhile
            self._reply.abort()
            error = WorkerError("early_close", "its prefill failed")
            return replace(outcome, error=error, bytes_to_client=1), None, "pair"
        if outcome.error is None and (refusal := self._collected.held) is not None:
            refusal.deliver(self._reply)
        pair = _of_pair(outcome, outcome.held or self._collected.held)
        whose: Whose = "prefill" if pair is None else "pair"
        return replace(pair or outcome, bytes_to_client=0), None, whose

    def _answered(self, outcome: Outcome, own: int | None) -> tuple[Outcome, int | None, Whose]:
        """The answer is over, whatever became of the prefill."""
        request, error = self._request, outcome.error
        failed = isinstance(error, WorkerError) and not outcome.bytes_to_client
        seen = request.beside is not None and request.beside.outcome is not None
        if self._prefill.done() and not seen:
            first = self._prefill.result()
            if failed and first.error is not None:  # both, and nobody knows which one first
                return _of_pair(outcome, outcome.held) or outcome, own, "pair"
            request.beside_ended(first)
        if not isinstance(error, WorkerError) or not failed:
            return outcome, own, "answer"
        if error.kind == "timeout_first_byte" and not self._prefill.done():
            return outcome, own, "pair" if self._transfer.answers_late else "prefill"
        pair = _of_pair(outcome, outcome.held)
        return (outcome, own, "answer") if pair is None else (pair, own, "pair")


def _of_pair(outcome: Outcome, held: HeldReply | None) -> Outcome | None:
    """What became of a leg, where its error's text says that KV did not pass; else None."""
    error = outcome.error
    if not isinstance(error, WorkerError) or held is None or not _OF_PAIRS.search(held.body):
        return None
    if not _OF_WAITS.search(held.body):
        return outcome
    return replace(outcome, error=WorkerError("transfer_timeout", error.message))


async def _stopped(answer: asyncio.Task[Answered]) -> Answered | None:
    """Stop it; what became of it, where it was over already."""
    answer.cancel()
    await asyncio.wait((answer,))
    return None if answer.cancelled() else answer.result()


async def _both_stopped(*legs: asyncio.Task[Any]) -> bool:
    """Stop them, whatever happens meanwhile; whether this was cancelled then."""
    cancelled = False
    for leg in legs:
        leg.cancel()
    while not all(leg.done() for leg in legs):
        try:
            await asyncio.wait(legs)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _edited(edit: Callable[[bytes], Leg], body: bytes) -> Leg:
    """A body as a leg's worker is sent it; a long one is edited beside the event loop."""
    return edit(body) if len(body) < LONG_BYTES else await asyncio.to_thread(edit, body)


def _body_for(member: Member, request: InferenceRequest, body: bytes) -> bytes:
    """What this worker is sent: `body`, or with ids in it instead of the text."""
    if request.arrival.request_id % _UNCHANGED_EVERY == 0:  # its worker counts tokens by itself
        return body
    if (kind := member.kind) is None:  # not known yet
        return body
    return with_token_ids(body, request.http.path, kind, request.prompt.encoded)
