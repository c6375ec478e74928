"""What serving a request needs of the decision core, and what is recorded of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from msgspec.json import encode

from policies.contract import record
from policies.facts import Arrival
from router.core.actions import Dispatch, Reject
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.metrics.registry import RouterMetrics
from router.record.logs import about
from router.record.request_log import Entry, RequestLog
from router.request.decisions import DecisionLog, Record
from router.request.errors import WorkerError
from router.request.explain import (
    HELD_CODES,
    TO_CLIENTS,
    Asked,
    explanation,
    refusal_line,
    reply_headers,
)
from router.request.prompts import TokenCheck
from router.request.switchboard import Switchboard, Ticket
from router.upstream.reply import Header, Outcome, Usage


def card(name: str, identity: tuple[str, str | None], max_tokens: int | None) -> dict[str, Any]:
    """A model as `GET /v1/models` shows it, adapters as vLLM does."""
    base, adapter = identity
    limit = {} if max_tokens is None else {"max_model_len": max_tokens}
    return {
        "id": name,
        "object": "model",
        "created": 0,  # nobody says, and OpenAI's clients want a number
        "owned_by": "warmroute",
        "parent": None if adapter is None else base,
        **limit,
    }


@record
class Errand:
    """One attempt: to which worker, and what the router adds to that worker's answer."""

    worker_id: int
    headers: tuple[Header, ...]
    carrier: Member | None  # None: the worker is gone since it was chosen
    uncached_tokens: int = 0  # of its prompt, as expected there
    wait_s: float = 0.0  # before it is begun, after another worker failed the request
    why: bytes = b""  # of a traced request: the decision, `record.explanation.explanation` as JSON


@record
class Named:
    """How a request is known outside, for log lines and spans."""

    id: str = ""  # `x-request-id`; "": it has none, for nobody writes it down
    trace: str = ""  # its trace id; "": it is part of none that is known here
    traced: bool = False  # spans are made of it


NOBODY = Named()


_DRAINING = "draining"  # a rejection's code

log = logging.getLogger(__name__)


class LocalCase:
    """One request and all that is kept of it. Lifetime: request."""

    __slots__ = (
        "_action", "_arrival", "_desk", "_entry", "_explain", "_named", "_record", "_resumes",
        "request_id", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        desk: LocalDesk,
        arrival: Arrival,
        explain: Asked,
        ticket: Ticket,
        named: Named = NOBODY,
    ) -> None:
        self.request_id = arrival.request_id
        self.ticket = ticket
        self._desk = desk
        self._arrival = arrival
        self._explain = explain
        self._named = named
        self._entry: Entry | None = None
        self._action: Dispatch | None = None  # the latest, and what is kept of it
        self._record: Record | None = None
        self._resumes = False  # the next errand goes on with an answer that has begun

    def __enter__(self) -> LocalCase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Whatever happened, the log gets its line and the core the request's end."""
        try:
            if self._entry is not None:
                self._entry.__exit__(kind, error, trace)
        finally:
            self.ticket.__exit__(kind, error, trace)

    def arrive(self) -> None:
        """Bring it before the core."""
        desk = self._desk
        if desk.draining and desk.refuses():
            counters, settings = desk.switchboard.core.counters, desk.switchboard.core.settings
            counters.rejections[_DRAINING] += 1
            why = "the router is draining"
            self.ticket.put(Reject(self.request_id, 503, _DRAINING, why, settings.retry_after_s))
        else:
            self.ticket.arrive(self._arrival)
        if self._desk.request_log is not None:
            self._entry = self._desk.request_log.entry(self._arrival)

    async def next_errand(self) -> Errand | Reject:
        """Where to send the request, or how to turn it away; waits while it is held."""
        action = await self.ticket.next_action()
        return action if isinstance(action, Reject) else self.errand(action)

    def errand(self, action: Dispatch) -> Errand:
        """Note the core's choice, and say how to go about it."""
        desk, worker_id = self._desk, action.worker_id
        if self._entry is not None:
            worker = desk.switchboard.core.workers.get(worker_id)
            self._entry.dispatched(action, None if worker is None else worker.facts.block_size)
        if self._resumes:
            decision = action.decision
            desk.metrics.migrations.resent(decision.prompt_tokens - decision.hit_tokens)
        self._action = action
        self._record = desk.decisions.add(self._arrival, action, desk.clock())
        headers = reply_headers(action, self.request_id, self._explain)
        uncached = action.decision.prompt_tokens - action.decision.hit_tokens
        carrier = desk.fleet.members.get(worker_id)
        why = b""
        if self._named.traced:
            why = encode(explanation(self.request_id, worker_id, action.decision))
        return Errand(worker_id, headers, carrier, uncached, action.after_s, why)

    def first_token(self, now_s: float) -> None:
        """The answer began."""
        self.ticket.first_token(now_s)

    def progress(self, now_s: float, output_tokens: int) -> None:
        """The answer grew."""
        self.ticket.progress(now_s, output_tokens)

    def gone(self) -> None:
        """The errand's worker is gone: nothing was sent. Another errand follows."""
        self.ticket.fail("busy", retry=True, reason="worker removed")

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Arrival | None = None) -> bool:
        """An errand is over; True when another one follows.

        `own_tokens`: our exact count of the prompt's tokens, to be held against the worker's.
        `rest`: what is left of the request where the outcome is resumable.
        """
        action, desk = self._action, self._desk
        assert action is not None, f"request {self.request_id} ended before it was sent"
        desk.metrics.outcome(self._arrival, action, outcome, desk.clock())
        if self._record is not None:
            self._record.ended(self._arrival, outcome)
        if self._entry is not None:
            self._entry.ended(outcome)
        self._compare(outcome, own_tokens)
        self._resumes = outcome.resumable
        return self._settle(action.worker_id, outcome, rest)

    def why_refused(self, reject: Reject) -> str | None:
        """The explanation's line for a refusal's header; None where there is none to give."""
        if self._explain not in TO_CLIENTS or reject.code not in HELD_CODES:
            return None
        now_s = self._desk.clock()
        choice = self._desk.switchboard.explain(replace(self._arrival, now_s=now_s))
        return refusal_line(self._arrival, now_s, choice)

    def refused(self, reject: Reject, status: int) -> None:
        """The client was turned away with `status`."""
        if self._entry is not None:
            self._entry.rejected(reject, status)

    def _compare(self, outcome: Outcome, own_tokens: int | None) -> None:
        """Hold our count of the prompt's tokens against the worker's."""
        check, usage = self._desk.check, outcome.usage
        if check is None or own_tokens is None or usage is None or outcome.error is not None:
            return
        if usage.prompt_tokens is not None:
            check.counted(self._arrival.model, own_tokens, usage.prompt_tokens)

    def _settle(self, worker_id: int, outcome: Outcome, rest: Arrival | None) -> bool:
        """Tell the core how the dispatch ended; True when another action follows."""
        error, ticket = outcome.error, self.ticket
        if error is None:
            usage = outcome.usage or Usage(completion_tokens=outcome.events or None)
            counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            ticket.finish(*counts, refused=not outcome.answers)
            return False
        if isinstance(error, WorkerError) and error.kind == "absent":
            self._desk.fleet.lacks(worker_id, self._arrival.needs)
            ticket.fail("busy", retry=outcome.retryable, reason="absent")
            return outcome.retryable
        if isinstance(error, WorkerError):
            log.warning(
                "request %d: worker %d failed (%s): %s%s",
                self.request_id,
                worker_id,
                error.kind,
                error.message,
                "; asking for another worker" if outcome.retryable else "",
                extra=about(self._named.id, self._named.trace),
            )
            ticket.fail(
                "busy" if error.kind == "busy" else "worker",
                retry=outcome.retryable,
                reason=error.kind,
                rest=rest,
            )
            return outcome.retryable
        ticket.fail("client", retry=False, reason="client left")
        return False


class LocalDesk:
    """Lifetime: process."""

    def __init__(
        self,
        switchboard: Switchboard,
        fleet: FleetManager,
        metrics: RouterMetrics,
        decisions: DecisionLog,
        request_log: RequestLog | None = None,
        check: TokenCheck | None = None,
    ) -> None:
        self.switchboard = switchboard
        self.fleet = fleet
        self.metrics = metrics
        self.decisions = decisions
        self.request_log = request_log
        self.check = check
        self.draining = False  # an operator wants no new requests to come
        self.retired = ""  # why this router is about to end
        self.refuses: Callable[[], bool] = lambda: False  # new ones, while it drains
        self.clock = switchboard.clock
        self.next_request_id = switchboard.next_request_id
        self.models = switchboard.core.workers.models
        self.block_sizes = switchboard.core.workers.block_sizes
        self.identity = switchboard.core.workers.identity

    def case(self, arrival: Arrival, explain: Asked, named: Named = NOBODY) -> LocalCase:
        """A request that was read and understood."""
        explained = explain != "no" or named.traced
        ticket = self.switchboard.ticket(arrival.request_id, explained)
        return LocalCase(self, arrival, explain, ticket, named)

    def ready_workers(self) -> int:
        """How many workers take requests now."""
        return sum(w.takes_requests for w in self.switchboard.core.workers)

    def ready_by_model(self) -> dict[str, int]:
        """Of each model served, sorted: how many of its workers take requests now."""
        workers = self.switchboard.core.workers
        return {m: sum(w.takes_requests for w in workers.serving(m)) for m in workers.models()}

    def reasons(self) -> tuple[str, ...]:
        """Why no new requests are wanted here, whatever the workers say; none: they are."""
        drained = "the router is draining" if self.draining else ""
        return tuple(why for why in (drained, self.retired) if why)

    def drain(self, by: str) -> None:
        """Be ready no more. What comes is served, or refused where the configuration says so."""
        log.info("the router is draining, by %s", by)
        self.draining = True

    def undrain(self, by: str) -> None:
        """Take that back."""
        log.info("the router drains no more, by %s", by)
        self.draining = False

    def faulty(self, status: int) -> None:
        """A request was refused as its client's own fault, or (500) ended by a defect of ours."""
        self.metrics.faults.faulty(status)

    def cards(self) -> list[dict[str, Any]]:
        """Each model once, with the shortest limit of its workers."""
        limits: dict[str, list[int]] = {}
        for member in self.fleet.members.values():
            if member.recognized is None:
                continue
            facts = member.recognized.facts
            for name in facts.models:
                known = limits.setdefault(name, [])
                if facts.max_model_tokens is not None:
                    known.append(facts.max_model_tokens)
        return [
            card(name, self.identity(name), min(known, default=None))
            for name, known in limits.items()
        ]
