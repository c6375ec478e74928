"""Connects the code that does I/O with the decision core, which chooses workers.

The dispatcher passes facts to the core, and carries out the actions that the core returns. Each
request has a `Ticket`, which receives the actions for this request. When the ticket is closed, the
core is told exactly once that the request has ended, whatever the reason is. So a finished request
never stays in the core's counts of load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from policies.facts import Arrival, Fact, Failure, Finish, FirstToken, Prefilled, Progress
from policies.load import LoadedPolicy
from router.core.contract.actions import (
    Abandon,
    Action,
    Busied,
    Cancel,
    Confirmed,
    Dispatch,
    Doubted,
    Ejected,
    Followed,
    Hold,
    Others,
    Panic,
    Probe,
    Reinstated,
    Reject,
    Relieved,
    Resync,
)
from router.core.core import RouterCore, take
from router.core.placement.choice import Choice, Withheld
from router.core.placement.health import STALLED
from router.record.model_limits import model_limits
from router.record.recorder import FactRecorder

log = logging.getLogger(__name__)

_DOUBTED_HITS_LOGS = {
    "overflow": "%(worker)s: its KV events tell of more blocks than it has room for: all of "
    "them forgotten; its hits count to %(percent).0f %%",
    "refuted": "%(worker)s: answers keep finding less than its KV events promise: its hits "
    "count to %(percent).0f %%",
    "useless": "%(worker)s: its KV events are of no use, for none of them can be used "
    "(events_skipped in /workers says why): the router estimates its cache",
    "sizes": "%(worker)s: its KV events are of no use: their blocks have several sizes; "
    "the router estimates its cache",
}
_PANIC_LOGS = {
    True: "most workers of %s leave probes unanswered (%d of %d): as likely it is this router or "
    "its network; nothing moves, and new requests wait for one that answers",
    False: "most workers of %s answer again (%d of %d are silent): requests go to them as before",
}
_OTHER_LOAD_LOGS = {
    True: "%.0f %% of the requests at the workers are not of this router: what they do to caches "
    "and queues is not foreseen; let all routers of a pool share, and send clients to them only",
    False: "%.0f %% of the requests at the workers are not of this router: few again",
}


RequestPhase = Literal["read", "waiting", "sent", "over"]
# The states of a request, as its ticket follows them: (state, event) -> the next state.
REQUEST_STATES: Mapping[tuple[RequestPhase, str], RequestPhase] = MappingProxyType(
    {
        ("read", "asks for a worker"): "waiting",
        ("waiting", "a worker is chosen"): "sent",
        ("waiting", "the core refuses it"): "over",
        ("waiting", "it is given up"): "over",
        ("sent", "its first leg is over"): "waiting",
        ("sent", "another worker shall try"): "waiting",
        ("sent", "it is answered"): "over",
        ("sent", "it is given up"): "over",
        # A request that waited when the router stopped: it was given up before its client was told.
        ("over", "the core refuses it"): "over",
    }
)


class Ticket:
    """Reports the events of one request to the decision core, and receives the core's actions.

    Lifetime: request.
    """

    request_id = -1  # until it reaches the core
    phase: RequestPhase = "read"
    runs_on = False  # its worker may compute on after its client has left
    _waiter: asyncio.Future[None] | None = None

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._actions: list[Dispatch | Reject] = []  # one, but for a moment

    def close(self) -> None:
        """Remove the request from the dispatcher. If the request has not ended, first tell the
        decision core that its client has left.
        """
        try:
            if self.is_open:
                self.fail("client", retry=False, reason="client left")
        finally:
            self._dispatcher.forget(self)

    @property
    def is_open(self) -> bool:
        """Return True if the request was submitted to the decision core and has not ended."""
        return self.phase in ("waiting", "sent")

    def enter(self, request_id: int, explained: bool = False) -> None:
        """Register this ticket to receive the actions for the request `request_id`. `explained`
        True means that the decision core must record why it decides as it does.
        """
        self.request_id = request_id
        self._move("asks for a worker")
        self._dispatcher.enter(self, explained)

    def arrive(self, arrival: Arrival, explained: bool = False) -> None:
        """Submit the request to the decision core; `next_action` then returns the decision.
        `explained` True means that the decision core must record why it decides as it does.
        """
        self.enter(arrival.request_id, explained)
        self._dispatcher.handle_fact(arrival)

    def refuse(self, refusal: Reject) -> None:
        """Refuse the request without asking the decision core; `next_action` then returns the
        refusal.
        """
        self.enter(refusal.request_id)
        self.put(refusal)

    async def next_action(
        self, while_held: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Dispatch | Reject:
        """Wait for the decision core's next action: a dispatch to workers, or a refusal.

        `while_held` returns a context manager that is entered while the core holds the request.
        """
        if not self._actions:
            with while_held():
                while not self._actions:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        action = self._actions.pop(0)
        is_refusal = isinstance(action, Reject)
        self._move("the core refuses it" if is_refusal else "a worker is chosen")
        return action

    def put(self, action: Dispatch | Reject) -> None:
        """Pass an action of the decision core to `next_action`, which the request may be waiting
        for.
        """
        self._actions.append(action)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def first_token(self, now_s: float) -> None:
        """Tell the decision core that the answer's first token arrived."""
        self._dispatcher.handle_fact(FirstToken(now_s, self.request_id))

    def prefilled(self, cached_tokens: int | None, *, waits: bool) -> None:
        """Tell the decision core that the prefill leg has ended well.

        `cached_tokens` is how many prompt tokens the prefill worker had cached, or None if unknown.
        `waits` is True if the core must now choose a worker for the decode leg, and False if that
        leg was sent already.
        """
        if waits:
            self._move("its first leg is over")
        now_s = self._dispatcher.clock()
        self._dispatcher.handle_fact(Prefilled(now_s, self.request_id, cached_tokens))

    def progress(self, now_s: float, output_tokens: int) -> None:
        """Tell the decision core that the running answer has `output_tokens` tokens so far."""
        self._dispatcher.handle_fact(Progress(now_s, self.request_id, output_tokens))

    def finish(
        self,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        *,
        refused: bool = False,
    ) -> None:
        """Tell the decision core that the answer is complete, with the worker's token counts.

        A count is None if the worker did not report it. `refused` True means that the worker
        refused the request with a 4xx status.
        """
        self._move("it is answered")
        now_s = self._dispatcher.clock()
        self._dispatcher.handle_fact(
            Finish(now_s, self.request_id, prompt_tokens, cached_tokens, output_tokens, refused)
        )

    def fail(
        self,
        blame: Literal["client", "worker", "busy"],
        *,
        retry: bool,
        reason: str,
        rest: Arrival | None = None,
        leg: Literal["answer", "prefill", "pair"] = "answer",
        busy_s: float | None = None,
    ) -> None:
        """Tell the decision core that an attempt ended without a complete answer.

        `blame` says who caused this: the client, a fault of the worker, or a worker that is only
        busy. `retry` is True if the core must choose another worker. `rest` describes what is still
        to do of the request, if the client has a part of the answer. `leg` is the leg that failed;
        if it is the prefill leg and `retry` is False, the answer continues. `busy_s` is for how
        many seconds a busy worker wants no requests (see `Failure`).
        """
        if retry:
            self._move("another worker shall try")
        elif leg != "prefill":
            self._move("it is given up")
        now_s, runs_on = self._dispatcher.clock(), blame == "client" and self.runs_on
        what = (blame, retry, reason, rest, leg, runs_on, busy_s)
        self._dispatcher.handle_fact(Failure(now_s, self.request_id, *what))

    def _move(self, event: str) -> None:
        self.phase = REQUEST_STATES[self.phase, event]


@dataclass(frozen=True, slots=True)
class FleetCalls:
    """The functions of the fleet with which the core's actions on a worker, given by its id, are
    carried out.
    """

    resync: Callable[[int, int], None]  # its events, from a number on
    probe: Callable[[int, float | None], None]  # within this many seconds; None: as usual
    given_up: Callable[[int], None]
    stalled: Callable[[int], None]


def _nothing(*_: object) -> None:
    """Do nothing, because there is no fleet."""


_NO_FLEET = FleetCalls(_nothing, _nothing, _nothing, _nothing)


class Dispatcher:
    """Passes facts to the core and carries out its actions. All of this happens in one event loop,
    so that the core needs no lock. Lifetime: process.
    """

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        fleet: FleetCalls = _NO_FLEET,
        recorder: FactRecorder | None = None,
    ) -> None:
        """Start without requests. `fleet` carries out the core's actions on workers; `recorder`
        records every fact.
        """
        self.core = core
        self.clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._explained = core.chooser.explained
        self._next_request_id = 0
        self._holds_not = ""  # why no request waits for a worker any more
        self.recorder = recorder
        self._fleet = fleet
        self._label = core.workers.label  # of a worker, for logs

    def next_request_id(self) -> int:
        """Return a new request id."""
        request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        return request_id

    def enter(self, ticket: Ticket, explained: bool) -> None:
        """Register the ticket of a new request."""
        if explained:
            self._explained.add(ticket.request_id)
        self._tickets[ticket.request_id] = ticket

    def forget(self, ticket: Ticket) -> None:
        """Remove the ticket of a request that has ended."""
        self._tickets.pop(ticket.request_id, None)
        self._explained.discard(ticket.request_id)

    def turn_away_held(self, why: str) -> int:
        """Refuse all requests that wait in the core, now and from now on, because the router stops.
        Return how many waited.
        """
        self._holds_not = why
        turned_away = 0
        for request_id in self.core.held.requests():
            if request_id in self.core.held.requests():  # the end of one may send off another
                self._turn_away(request_id)
                turned_away += 1
        return turned_away

    def _turn_away(self, request_id: int) -> None:
        ticket, why = self._tickets[request_id], self._holds_not
        ticket.fail("client", retry=False, reason=why)
        retry_after_s = self.core.settings.retry_after_s
        ticket.put(Reject(request_id, 503, "shutting_down", why, retry_after_s))

    def handle_fact(self, fact: Fact) -> None:
        """Pass a fact to the core and carry out its actions."""
        if self.recorder is None:
            actions = take(self.core, fact)
        else:
            actions = self.recorder.record(fact, partial(take, self.core))
        if self.core.guard.overdue_s:
            self._settle_slow(fact.now_s, self.core.guard.overdue_s)
        for action in actions:
            self._do(action)

    def explain(self, arrival: Arrival) -> Choice | Withheld | Reject:
        """Return what the core would decide for `arrival` now, without sending the request or
        counting it as load.
        """
        if self.recorder is not None:
            arrival = self.recorder.explain(arrival)
        return self.core.explain(arrival)

    def explain_held(self, request_id: int) -> Choice | Withheld | Reject | None:
        """Return why this request waits now; None if it does not wait."""
        self.advance()
        return self.core.explain_held(request_id, self.clock())

    def advance(self) -> None:
        """Update the core's estimates of load to the present time, before they are read."""
        now_s = self.clock()
        if self.recorder is not None:
            self.recorder.advance(now_s)
        self.core.ledger.advance(now_s)

    def set_policy(self, policy: LoadedPolicy) -> None:
        """Let another policy decide from now on. If it is unusable, raise PolicyError and keep the
        previous one.
        """
        self.core.set_policy(policy)
        if self.recorder is not None:
            self.recorder.set_policy(policy.spec)

    def set_model_limits(self, lines: Sequence[str]) -> None:
        """Limit models by these lines, MODEL:KEY=NUMBER,..., from now on. Raises ValueError if a
        line is malformed.
        """
        limits = model_limits(lines)
        if limits == self.core.model_limits.limits:
            return
        self.core.set_model_limits(limits)
        if self.recorder is not None:
            self.recorder.set_model_limits(lines)

    def _settle_slow(self, now_s: float, took_s: float) -> None:
        if self.recorder is not None:  # a player has another clock
            self.recorder.slow(now_s, took_s)
        self.core.guard.settle_slow(now_s, took_s)

    def _do(self, action: Action) -> None:
        match action:
            case Dispatch() | Reject():
                self._tickets[action.request_id].put(action)
            case Resync():
                self._fleet.resync(action.worker_id, action.from_seq)
            case Hold() if self._holds_not:
                self._turn_away(action.request_id)
            case Hold():
                pass  # the ticket waits; another action will come
            case Abandon():
                self._fleet.given_up(action.worker_id)
            case Panic():
                log.warning(_PANIC_LOGS[action.begins], action.model, action.silent, action.workers)
            case Probe():
                self._fleet.probe(action.worker_id, action.within_s)
            case Ejected():
                log.warning(
                    "%s keeps failing (%s): no new requests for %.1f s",
                    self._label(action.worker_id),
                    action.reason,
                    action.ejected_s,
                )
                if action.reason == STALLED:
                    self._fleet.stalled(action.worker_id)
            case Doubted():
                known = {
                    "worker": self._label(action.worker_id),
                    "percent": 100 * action.confidence,
                }
                log.warning(_DOUBTED_HITS_LOGS[action.reason], known)
            case Followed(told_block_size=told, block_size=size) if told != size:
                line = "%s: its KV events come in blocks of %d tokens, it says %d: followed"
                log.warning(line, self._label(action.worker_id), size, told)
            case Followed():
                line = "%s: its KV events are followed in blocks of %d tokens, as it says"
                log.warning(line, self._label(action.worker_id), action.block_size)
            case Confirmed():
                line = "%s: answers find what its KV events promise: its hits count in full"
                log.warning(line, self._label(action.worker_id))
            case Others():
                log.warning(_OTHER_LOAD_LOGS[action.many], 100 * action.share)
            case Busied():
                line = "%s says that it is busy: others get its requests for %.1f s"
                log.warning(line, self._label(action.worker_id), action.busy_s)
            case Relieved():
                line = "%s says no more that it is busy, as it did for %.1f s"
                log.warning(line, self._label(action.worker_id), action.lasted_s)
            case Reinstated():
                line = "%s answers again: it gets requests as before"
                log.warning(line, self._label(action.worker_id))
            case Cancel():
                pass  # the worker's connections are closed with it (router.fleet.manager); of two
                # legs at once the other one was stopped before the core was told
