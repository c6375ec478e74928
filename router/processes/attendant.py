"""Who serves one satellite at the leader: opens its requests' cases, answers, ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.facts import Arrival
from router.core.actions import Dispatch, Reject
from router.http.desk import Named
from router.http.local_desk import LocalCase, LocalDesk
from router.http.permits import EXHAUSTED, tokens_used, too_many
from router.http.relay.reply import Outcome
from router.keys.grant import Grant
from router.processes.line import GarbageError, Line
from router.processes.messages import (
    REQUEST_IDS_BITS,
    Arrived,
    Beat,
    Begun,
    Ended,
    Faulty,
    Figures,
    Grown,
    Joined,
    Left,
    Logged,
    Missed,
    OfSatellite,
    Refused,
    Sent,
    Turned,
)
from router.processes.told import arrival_of, outcome_of
from router.processes.usage import Usage
from router.switchboard import Ticket

if TYPE_CHECKING:
    from router.processes.leading import Leading

log = logging.getLogger(__name__)

_NO_HASHES = np.zeros(0, dtype=np.uint64)
_BROKEN = "an internal error of the router"
_NO_REJECT = Reject(0, 503, "", "")


@dataclass(slots=True)
class _Open:
    """A satellite's request. Lifetime: request."""

    case: LocalCase
    arrival: Arrival
    grant: Grant | None = None  # of its key
    lost: Outcome | None = None  # of the worker that a begun stream left
    reject: Reject | None = None  # told to the satellite
    away: bool = False  # sent to a worker


class _ToldTicket(Ticket):
    """A ticket whose actions leave for a satellite. Lifetime: request."""

    def __init__(self, attendant: Attendant, request_id: int) -> None:
        super().__init__(attendant.desk.switchboard, request_id)
        self._attendant = attendant

    def put(self, action: Dispatch | Reject) -> None:
        """An action of the core: told once the core is through with what it does now."""
        self._attendant.due(action)


class Attendant:
    """Lifetime: connection."""

    def __init__(self, desk: LocalDesk, leading: Leading) -> None:
        self.desk = desk
        self.line: Line[OfSatellite] = Line(OfSatellite, self._heard, self._lost)
        self.seat = 0
        self.pid: int | None = None  # once it has said who it is
        self.usage: Usage | None = None
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self._leading = leading
        self._first_id = 0
        self._open: dict[int, _Open] = {}
        self._due: list[Dispatch | Reject] = []
        self._telling = False

    def due(self, action: Dispatch | Reject) -> None:
        """An action to be told."""
        self._due.append(action)
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        """Tell what is due. Telling may cause more of it, which follows at once."""
        self._telling = True
        while self._due:
            due, self._due = self._due, []
            for action in due:
                if (held := self._open.get(action.request_id)) is not None:
                    self._act(held, action)
        self._telling = False
        self.line.flush()

    def _act(self, held: _Open, action: Dispatch | Reject) -> None:
        if isinstance(action, Dispatch):
            errand = held.case.errand(action)
            held.away = True
            headers = errand.headers
            if held.grant is not None:
                left = held.grant.headers(self.desk.clock())
                headers += tuple((name.encode(), value.encode()) for name, value in left)
            parts = (errand.worker_id, headers, errand.uncached_tokens, errand.wait_s, errand.why)
            self.line.say(Sent(action.request_id, *parts))
            return
        held.reject = action
        held.case.ticket.open = False
        why = held.case.why_refused(action)
        refusal = (action.status, action.code, action.message, action.retry_after_s, why)
        self.line.say(Turned(action.request_id, *refusal))

    # --- what the satellite says --------------------------------------------------------------

    def _heard(self, messages: Sequence[OfSatellite]) -> None:
        self.heard_s = self._loop.time()
        self._telling = True  # no need to wait for another turn: we tell when we are through
        for message in messages:
            try:
                self._take(message)
            except GarbageError:
                raise
            except Exception:
                log.exception("a message of satellite %d could not be carried out", self.seat)
                self._broken(getattr(message, "request_id", None))
        self._tell()

    def _broken(self, request_id: int | None) -> None:
        """A defect of ours ends the request it met, and no other one."""
        if request_id in self._open:
            self._due = [action for action in self._due if action.request_id != request_id]
            self.desk.faulty(500)
            self.line.say(Turned(request_id, 500, "internal_error", _BROKEN, None, None))
            self._close(request_id, RuntimeError)

    def _take(self, message: OfSatellite) -> None:
        if self.pid is None and not isinstance(message, Joined):
            raise GarbageError("it does not say who it is")
        match message:
            case Arrived():
                self._arrived(message)
            case Begun():
                if (held := self._away(message.request_id)) is not None:
                    held.case.first_token(self.desk.clock())
            case Grown():
                if (held := self._away(message.request_id)) is not None:
                    held.case.progress(self.desk.clock(), message.output_tokens)
            case Ended():
                self._ended(message)
            case Missed():
                if (held := self._away(message.request_id)) is not None:
                    held.away = False
                    held.case.gone()
            case Refused():
                if (held := self._open.get(message.request_id)) is not None:
                    held.case.refused(held.reject or _NO_REJECT, message.status)
                    self._used(held, held.lost)
                    self._close(message.request_id, None)
            case Left():
                self._close(message.request_id, RuntimeError if message.ours else OSError)
            case Faulty():
                self.desk.faulty(message.status)
            case Figures():
                self.usage = Usage(message.cpu_s, message.resident_bytes)
                self._leading.tally.take(self, message.families)
                self.line.say(Beat())
            case Logged():
                self.desk.log_lines(message.lines)
            case Joined():
                self._joined(message)

    def _joined(self, message: Joined) -> None:
        if self.pid is not None:
            raise GarbageError("it says who it is twice")
        welcome = self._leading.welcome(message)
        if welcome is None:
            self.line.close("no numbers are left for its requests")
            return
        self.seat, self.pid = message.seat, message.pid
        self._first_id = welcome.first_request_id
        self.line.say(welcome)

    def _arrived(self, message: Arrived) -> None:
        request_id = message.request_id
        mine = request_id >> REQUEST_IDS_BITS == self._first_id >> REQUEST_IDS_BITS
        if not mine or request_id in self._open:
            raise GarbageError(f"request {request_id} is not its to open")
        arrival = self._whole(message)
        grant = self._leading.grant(message.whose)
        if grant is not None and not self._lets_pass(grant, arrival):
            return
        switchboard = self.desk.switchboard
        ticket = _ToldTicket(self, request_id)
        switchboard.enter(ticket, message.explain != "no" or message.traced)
        named = Named(message.id, message.trace, message.traced)
        case = LocalCase(self.desk, arrival, message.explain, ticket, named)
        self._open[request_id] = _Open(case, arrival, grant)
        case.arrive()

    def _lets_pass(self, grant: Grant, arrival: Arrival) -> bool:
        """Whether its key has enough left for a request; else the satellite is told."""
        now_s = self.desk.clock()
        exhausted = grant.begin(now_s) or grant.spend(now_s, arrival.prompt_tokens)
        if exhausted is None:
            return True
        error = too_many(exhausted, grant.headers(now_s))
        grant.end(now_s)
        told = (error.status, EXHAUSTED, error.message, exhausted.retry_after_s, None)
        self.line.say(Turned(arrival.request_id, *told, error.headers))
        return False

    def _used(self, held: _Open, outcome: Outcome | None) -> None:
        """Take off its key's allowance what a worker gave."""
        if held.grant is None or outcome is None:
            return
        tokens = tokens_used(outcome, held.arrival.prompt_tokens)
        if tokens is not None:
            held.grant.used(self.desk.clock(), *tokens)

    def _whole(self, message: Arrived) -> Arrival:
        """The request, with a chain for each block size that its pool has by now.

        A satellite may not have heard of a worker that has just joined: for its blocks the prompt
        counts as one of which nobody knows a block.
        """
        try:
            arrival = arrival_of(message, self.desk.clock())
        except ValueError as error:
            raise GarbageError(f"request {message.request_id}: {error}") from error
        missing = self.desk.block_sizes(message.model) - arrival.chains.keys()
        if missing:
            arrival.chains.update(dict.fromkeys(missing, _NO_HASHES))  # type: ignore[attr-defined]
        return arrival

    def _ended(self, message: Ended) -> None:
        held = self._away(message.request_id)
        if held is None:
            return
        held.away = False
        rest = None if message.rest is None else self._whole(message.rest)
        outcome = outcome_of(message)
        if held.case.ended(outcome, message.own_tokens, rest):
            held.lost = outcome if outcome.resumable else held.lost
        else:
            self._used(held, outcome)
            self._close(message.request_id, None)

    def _away(self, request_id: int) -> _Open | None:
        """A request that is at a worker; None: it is over here, as when its worker went."""
        held = self._open.get(request_id)
        return held if held is not None and held.away else None

    def _close(self, request_id: int, kind: type[BaseException] | None) -> None:
        held = self._open.pop(request_id, None)
        if held is not None:
            if held.grant is not None:
                held.grant.end(self.desk.clock())
            held.case.__exit__(kind, None, None)

    def _lost(self, why: str) -> None:
        count = len(self._open)
        for request_id in list(self._open):
            self._close(request_id, OSError)
        self._leading.left(self, why, count)
