"""Defines the state of one request, and the result of one attempt at it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar

from policies.facts import Arrival
from router.body.paths import OTHER, Path
from router.http.messages import Request
from router.http.reply import HeldReply, Outcome
from router.record.explain import Asked
from router.record.named import NamedModel
from router.record.request_record import Attempt
from router.request.account import Account
from router.request.carrier import Carrier
from router.request.dispatcher import Ticket
from router.request.kept_kv import KeptKv
from router.request.moving import MovingStream
from router.request.prompts import Prompt
from router.upstream.client_reply import Reply
from router.upstream.kept_open_reply import KeptOpenReply
from router.waiting.queue import Began

T = TypeVar("T")
FaultyLeg = Literal["answer", "prefill", "pair"]  # as of `Failure.leg`


class ReadRequest(NamedTuple):
    """A request that was read: its body for the worker, and its description for the
    decision core.
    """

    body: bytes  # as its worker gets it
    path: Path
    arrival: Arrival  # as the core gets it
    prompt: Prompt
    explain: Asked  # the reader of the decision's reasons
    # The model's name and the rule that changed it; None: there is no rule.
    name: NamedModel | None = None


class AttemptEnd(NamedTuple):
    """The result of one attempt at a request, whether at one worker or at two."""

    reply: Reply | None = None  # the reply to the client; None: nothing was sent
    outcome: Outcome | None = None  # None: the worker was removed before anything was sent
    faulty_leg: FaultyLeg = "answer"  # of two legs at once: the one that the outcome is about
    prompt_tokens: int | None = None  # our exact count, to be compared with the worker's
    rest: Arrival | None = None  # the rest of a stream that another worker may continue
    handed_over: bool = False  # a first leg that ended well: a second one follows
    # Of a first leg: the client gets it if no other attempt follows.
    refusal: HeldReply | None = None
    unsent: str = "worker removed"  # the reason why nothing was sent, if there is no outcome


class RequestState:
    """The state of one request, from the arrival of its head to the last byte of its answer.
    Lifetime: request.

    This is a context manager. Its exit reports the end of the request, exactly once, to the
    decision core, the quota and the logs.
    """

    body: bytes  # these five once it was read
    arrival: Arrival
    prompt: Prompt
    explain: Asked
    name: NamedModel | None = None
    path: Path = OTHER
    # The prefill that began together with the latest attempt: sent by us, or by the sidecar of the
    # worker that decodes.
    prefill: Attempt | None = None
    sidecar_prefill: Attempt | None = None
    kept_kv: KeptKv | None = None  # of a first leg
    stream: MovingStream | None = None  # that may continue at another worker
    changed_pairs: int = 0  # how often a worker of two was of another revision at the last moment
    last_refusal: HeldReply | None = None  # a worker's words in place of an answer
    waits_since: Began | None = None  # it waited because no worker of its model was there
    waited_in_vain: bool = False
    rounds_after_loss: int = 0  # times that it was placed again after it lost a worker
    attempts_before_wait: int = 0  # made before it waited last
    kept_open: KeptOpenReply | None = None  # the client got comments while the request waited
    _exits: ExitStack | None = None

    def __init__(self, http: Request, carrier: Carrier, ticket: Ticket, account: Account) -> None:
        self.http = http
        self.carrier = carrier
        self.ticket = ticket  # its line to the core
        self.account = account  # its key, quota and records
        self.attempts: list[Attempt] = []  # oldest first

    def understood(self, read: ReadRequest) -> None:
        """Store the result of reading the request.

        Raises ClientError if the transport does not allow the request.
        """
        self.body, self.path, arrival, self.prompt, self.explain, self.name = read
        self.arrival = self.carrier.arrival(arrival, read.prompt, self.account.terms)
        self.ticket.runs_on = read.prompt.runs_on
        self.account.name = read.name

    def arrival_at_router(self) -> Arrival:
        """Return the request's description with the time of its arrival, which is before
        any wait.
        """
        if self.waits_since is None:
            return self.arrival
        return replace(self.arrival, now_s=self.waits_since.at_s)

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that is left when the request has ended, and return its value."""
        if self._exits is None:
            self._exits = ExitStack()
        return self._exits.enter_context(context)

    def __enter__(self) -> RequestState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._exits is not None:
                self._exits.close()
        finally:
            try:
                self.ticket.close()
            finally:
                self.carrier.ended()
                came = self.ticket.request_id >= 0 or self.waits_since is not None
                arrival = self.arrival if came else None
                self.account.close(error, arrival, self.attempts, self.body if arrival else b"")
