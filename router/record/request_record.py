"""Defines the record of one request, from which logs, spans and the list of latest decisions are
made.

The event loop only fills in these records; lines and spans are made elsewhere. Records contain no
text, no key, and no headers except those that identify the client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from policies.facts import Arrival
from router.core.contract.actions import Decision, Dispatch, regret_hit_tokens, regret_s
from router.core.workers.hit_modes import HitVerdict
from router.http.errors import ClientError, WorkerError
from router.http.reply import Outcome, Usage
from router.record.named import NamedModel
from router.record.trace import Trace

CLIENT_LEFT = 499  # the status of an answer for which the client did not wait
DEADLINE = "deadline_exceeded"  # the code of an end by the client's deadline

_KEPT = 1_000
_WEIGHED = 64  # workers, whose costs take half a kilobyte a decision
_NO_USAGE = Usage()


class Attempt:
    """One attempt at one worker: why the worker was chosen, and what the outcome was. Lifetime:
    until its request's record is written and 1,000 other attempts have followed.
    """

    __slots__ = (
        "address",
        "arrived_s",
        "block_size",
        "by_worker",
        "code",
        "decision",
        "decision_started_s",
        "ended_s",
        "error",
        "hits",
        "identity",
        "leg",
        "model",
        "name",
        "outcome",
        "request_id",
        "revision",
        "routed_by",
        "sent_s",
        "session",
        "span_id",
        "stream",
        "tenant",
        "wait_s",
        "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        arrival: Arrival,
        dispatch: Dispatch,
        sent_s: float,
        decision_started_s: float | None = None,
        block_size: int | None = None,
    ) -> None:
        """Begin an attempt at `sent_s`. `decision_started_s` is when the core got the request;
        `block_size` is the worker's, in tokens.
        """
        self.request_id = arrival.request_id
        self.arrived_s = arrival.now_s
        self.model = arrival.model
        self.session = arrival.session
        self.identity = arrival.identity
        self.tenant = arrival.tenant
        self.stream = arrival.stream
        self.worker_id = dispatch.worker_id
        self.leg = dispatch.stages[-1].role  # the worker's part of the request
        self.decision: Decision = dispatch.decision
        self.wait_s = dispatch.after_s  # before it is begun, after another worker failed
        self.decision_started_s = sent_s if decision_started_s is None else decision_started_s
        self.sent_s = sent_s
        self.block_size = block_size
        # The part of the request that decided, for people, if that is not plain.
        self.routed_by = ""
        # How exact the hits are, if an explanation was requested.
        self.hits: HitVerdict | None = None
        self.name: NamedModel | None = None  # the model's name and the rule that changed it
        self.revision: str | None = None  # of the worker, where there was a rule
        self.span_id = 0  # of a traced request
        self.address: tuple[str, int] | None = None  # of the worker; None: it was gone
        self.outcome: Outcome | None = None  # without its error, which holds on to the handler
        self.ended_s: float | None = None
        self.error: str | None = None  # the worker's kind, or the client's code
        self.by_worker = False  # the error is the worker's fault
        self.code: str | None = None  # of a client's error

    @property
    def uncached_tokens(self) -> int:
        """The prompt tokens that the worker was expected to compute."""
        return self.decision.prompt_tokens - self.decision.hit_tokens

    def end(self, outcome: Outcome, now_s: float) -> None:
        """Store the outcome of the attempt."""
        self.ended_s = now_s
        error = outcome.error
        if error is not None:
            if isinstance(error, WorkerError):
                self.error, self.by_worker = error.kind, True
            else:
                self.error, self.code = error.code or "client_left", error.code
            outcome = replace(outcome, error=None, held=None)
        self.outcome = outcome

    @property
    def finish(self) -> str:
        """How the attempt ended: "ok", the kind of the worker's error, "deadline_exceeded" or
        "client_left".
        """
        if self.error is None:
            return "ok"
        return self.error if self.by_worker or self.code == DEADLINE else "client_left"

    @property
    def prefilled(self) -> bool:
        """True if this attempt was a successful prefill for another worker, whose answer the client
        does not receive.
        """
        outcome = self.outcome
        return self.leg == "prefill" and outcome is not None and not self.error and outcome.answers

    @property
    def first_token_s(self) -> float | None:
        """The seconds from dispatch to the first byte of the answer; None if there is none yet, or
        the answer is not streamed.
        """
        outcome = self.outcome
        if not self.stream or outcome is None or outcome.first_byte_s is None:
            return None
        return max(outcome.first_byte_s - self.sent_s, 0.0) if outcome.answers else None

    @property
    def cached_tokens(self) -> int | None:
        """The cached prompt tokens that the worker reported, or None."""
        usage = None if self.outcome is None else self.outcome.usage
        return None if usage is None else usage.cached_tokens

    @property
    def worker_prompt_tokens(self) -> int | None:
        """The number of prompt tokens that the worker counted, or None; the router's own count may
        differ.
        """
        usage = None if self.outcome is None else self.outcome.usage
        return None if usage is None else usage.prompt_tokens

    @property
    def regret_s(self) -> float | None:
        """The seconds by which the first token came later than the second-best worker's cost
        predicted, or None (`router.core.contract.actions.regret_s`).
        """
        return regret_s(self.decision, self.first_token_s)

    @property
    def regret_hit_tokens(self) -> int | None:
        """The prompt tokens that the second-best worker had cached beyond the chosen one, or None
        (`router.core.contract.actions.regret_hit_tokens`).
        """
        return regret_hit_tokens(self.decision, self.cached_tokens)


class LatestAttempts:
    """The last 1,000 attempts of all requests, which are read newest first. Lifetime: process."""

    def __init__(self) -> None:
        self._attempts: deque[Attempt] = deque(maxlen=_KEPT)
        self.added = 0  # ever

    def add(self, attempt: Attempt) -> None:
        """Add an attempt. In a large pool, only the costs of the best workers are kept with it."""
        attempt.decision.trim(_WEIGHED)
        self._attempts.appendleft(attempt)
        self.added += 1

    def latest(self, count: int) -> list[Attempt]:
        """Return at most `count` attempts, newest first."""
        return [attempt for attempt, _ in zip(self._attempts, range(count), strict=False)]

    def of(self, request_id: int) -> list[Attempt]:
        """Return the kept attempts of one request, newest first."""
        return [attempt for attempt in self._attempts if attempt.request_id == request_id]


@dataclass(slots=True)
class RequestRecord:
    """One request that has ended. Times are on the router's clock. Lifetime: until it is
    written.
    """

    began_s: float
    end_s: float
    arrival: Arrival | None = None  # None: it was refused before it came before the core
    attempts: Sequence[Attempt] = ()
    id: str = ""  # `x-request-id`; "": the request has none
    trace: Trace | None = None
    trace_id: str | None = None  # 32 hexadecimal digits: of our own trace, else the client's
    client: str | None = None  # address
    tenant: str | None = None
    path: str = ""
    bytes_in: int = 0  # of the body
    written_bytes: int = 0  # to a client that left, so far
    read_s: float | None = None  # of a traced request: the whole body was there
    decision_started_s: float | None = (
        None  # of a traced one: the core was asked, and gave no worker
    )
    answered_s: float | None = None  # it refused; None: the request was given up before
    refused: tuple[int, str | None] | None = None  # status and code of a refusal
    # The reason why its handler ended early.
    broke: Literal["", "client_left", "internal_error"] = ""
    late_status: int | None = None  # of the answer where its deadline passed
    # The model's name and the rule that changed it; None: there is no rule.
    name: NamedModel | None = None

    @property
    def last(self) -> Attempt | None:
        """The latest attempt, or None if the request was sent to no worker."""
        return self.attempts[-1] if self.attempts else None

    @property
    def last_ended(self) -> Attempt | None:
        """The latest attempt at an answer for the client whose outcome is known, or None."""
        done = (one for one in reversed(self.attempts) if one.outcome and not one.prefilled)
        return next(done, None)

    @property
    def prefill(self) -> Attempt | None:
        """The prefill attempt whose KV the latest attempt used to decode, or None."""
        if len(self.attempts) < 2 or not self.attempts[-2].prefilled:
            return None
        return self.attempts[-2]

    @property
    def usage(self) -> Usage:
        """The token counts that the worker of the latest outcome reported; if it reported no cached
        tokens, those of the prefill worker.
        """
        ended, prefill = self.last_ended, self.prefill
        usage = (ended.outcome.usage if ended and ended.outcome else None) or _NO_USAGE
        if prefill is None or usage.cached_tokens is not None:
            return usage
        return replace(usage, cached_tokens=prefill.cached_tokens)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes, in order, of the attempts whose answers were for the client."""
        return [one.outcome for one in self.attempts if one.outcome and not one.prefilled]


def refusal_of(error: BaseException | None) -> tuple[int, str | None] | None:
    """Return the status and code of a client's error, or None for other errors."""
    return (error.status, error.code) if isinstance(error, ClientError) else None
