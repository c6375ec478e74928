"""Holds requests until a worker of their model takes requests, and then sends them little by
little.

This makes scaling to zero possible: an engine takes minutes to start, and until then its requests
are held here, with limits on their number, their bytes and their time. The most urgent ones are
sent first, and tenants get their shares, as among requests that wait for room at workers
(`router.core.placement.hold_queue`). The first worker does not get all of them at once (`pace`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from policies.facts import Arrival
from router.core.contract.actions import Rejection
from router.core.placement.admission import DISPLACED
from router.core.placement.hold_queue import FairQueue, Turn
from router.core.workers.table import WorkerTable, serves
from router.waiting.known_models import KnownModels
from router.waiting.pace import Pace
from router.waiting.settings import WaitingSettings

log = logging.getLogger(__name__)

# Models whose requests are counted separately, and the name for all others.
MODELS_COUNTED, OTHERS = 1_000, "(others)"
FULL, NOBODY_CAME = "worker_wait_full", "no_worker_available"
_MODELS_NAMED = 8  # in an error
_TELL_S = 60.0  # between two lines of the log about one model's waiting requests
_LATE = Rejection(504, "deadline_exceeded", "no worker was there in the client's time")


class Began(NamedTuple):
    """The time when a request first began to wait, which bounds its wait even if it waits several
    times.
    """

    at_s: float
    order: int  # of no other request; smaller ones came before


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits. Lifetime: as long as it waits."""

    model: str
    others: Callable[[], frozenset[str]]  # models whose workers would also do now
    tenant: str | None
    priority: int
    weight: float  # its tenant's
    fair_work: float  # its prompt by that weight
    body_bytes: int
    turn: Turn  # its place among its tenant's
    until_s: float  # it is refused then
    wait_s: float | None  # for so long it may wait; None: its client's deadline ends its wait
    end: asyncio.Future[Rejection | None]  # None: it may go on

    @property
    def count_key(self) -> tuple[int, str | None, str]:
        """The priority, tenant and model of the request; requests that have all three in common are
        counted together.
        """
        return self.priority, self.tenant, self.model


class _ModelLine:
    """The waiting requests of one model. Lifetime: as long as one of them waits."""

    def __init__(self) -> None:
        self.by_priority: dict[int, FairQueue[Waiter]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[Waiter]:
        """Return the requests that still wait, in the order in which they would be sent."""
        for priority in sorted(self.by_priority):
            turns = self.by_priority.get(priority)
            if turns is not None:
                yield from turns.in_turn(lambda waiter: waiter.end.done())

    def add(self, waiter: Waiter) -> None:
        self.by_priority.setdefault(waiter.priority, FairQueue()).add(waiter.tenant, waiter)
        self.count += 1

    def remove(self, waiter: Waiter, served: bool) -> None:
        turns = self.by_priority[waiter.priority]
        if served:
            turns.served(waiter.tenant, waiter.fair_work, waited=True)
        turns.remove(waiter.tenant, waiter)
        self.count -= 1
        if not turns:
            del self.by_priority[waiter.priority]


class WorkerWait:
    """The requests that wait for a worker of their model. Lifetime: process."""

    def __init__(
        self,
        workers: WorkerTable,
        known: KnownModels,
        clock: Callable[[], float],
        terms: Callable[[], WaitingSettings],
    ) -> None:
        """Start with no waiting request. `clock` returns seconds, on the clock of arrivals; `terms`
        returns the present limits.
        """
        self.known = known
        self.ends: Counter[str] = Counter(
            dict.fromkeys(("served", "late", "refused", "displaced", "left"), 0)
        )
        self.bytes = 0  # of bodies
        self.requests: Counter[str] = Counter()  # of known models that came, by model
        self._workers = workers
        self._clock = clock
        self.terms = terms
        self._lines: dict[str, _ModelLine] = {}
        self._waiters: dict[Waiter, None] = {}  # all, in the order in which they came
        self._counts: Counter[tuple[int, str | None, str]] = Counter()
        self._paces: dict[str, Pace] = {}  # by base model, while its workers let requests go
        self._logged: dict[str, float] = {}  # when the log last told of a model's waiting requests
        self._closed = ""  # the reason why no request may wait any more
        self._version = -1
        self._ready: dict[str, int] = {}  # by model that is served; as old as `_version`

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait here."""
        line = self._lines.get(model)
        return 0 if line is None else line.count

    def ready_workers(self, model: str) -> int:
        """Return how many workers of a model are ready and not silent.

        Return 0 as well if these cannot serve a request, because workers of one of the two roles
        are missing.
        """
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._ready.clear()
        ready = self._ready.get(model)
        if ready is None:
            serving = self._workers.serving(model)
            there = [w.facts for w in serving if w.state == "ready" and w.silent is None]
            ready = len(there) if serves(there) else 0
            if serving:  # a client may name any number of other models
                self._ready[model] = ready
        return ready

    def arrives(self, arrival: Arrival) -> bool:
        """Count a request, and return True if it must `wait` before the core chooses a worker."""
        model, requests = arrival.model, self.requests
        if model in requests:
            requests[model] += 1
        elif model in self.known:
            apart = len(requests) < MODELS_COUNTED or model in self.terms().models
            requests[model if apart else OTHERS] += 1
        # For most requests these look-ups suffice: the workers have not changed, and no request
        # waits.
        if self._version == self._workers.version and self._ready.get(model) and not self._lines:
            return False
        if not self.holds(model):
            return False
        return self.may_wait(arrival) or (self.is_promised() and model not in self.known)

    def holds(self, model: str) -> bool:
        """Return True if requests of a model must wait: it has no ready worker, or earlier requests
        still wait.
        """
        return model in self._lines or not self.ready_workers(model)

    def is_promised(self, model: str | None = None) -> bool:
        """Return True if `model` is listed in `waiting.models`, or, for None, if any model is
        listed there.

        The operator wants requests for a listed model to be held here although it has no worker.
        """
        terms = self.terms()
        return terms.wait_s > 0 and (bool(terms.models) if model is None else model in terms.models)

    def may_wait(self, arrival: Arrival) -> bool:
        """Return True if the request is one that may wait for a worker of its model."""
        bound_to_one = arrival.only is not None
        return self.terms().wait_s > 0 and not bound_to_one and arrival.model in self.known

    async def wait(
        self,
        arrival: Arrival,
        body_bytes: int,
        began: Began,
        others: Callable[[], frozenset[str]] = frozenset,
    ) -> Rejection | None:
        """Wait until the request may be sent to a worker, and return None; or return why it is
        refused.

        `others` returns the further models whose workers could answer the request by now.
        Cancelling the call ends the wait.
        """
        terms = self.terms()
        if arrival.model not in self.known:
            return Rejection(404, "model_not_found", self._unknown(arrival.model))
        if self._closed:
            return Rejection(503, "shutting_down", self._closed)
        victims = self._victims(arrival, body_bytes, terms)
        if victims is None:
            self.ends["refused"] += 1
            keys = "waiting.requests, waiting.bytes"
            why = f"{len(self)} requests wait for a first worker already ({keys})"
            return Rejection(503, FULL, why)
        for victim in victims:
            self._end(victim, "displaced", DISPLACED)
        waiter = self._waiter(arrival, body_bytes, began, terms, others)
        self._lines.setdefault(waiter.model, _ModelLine()).add(waiter)
        self._waiters[waiter] = None
        self._counts[waiter.count_key] += 1
        self.bytes += body_bytes
        end = None
        try:
            end = await waiter.end
        finally:
            if waiter in self._waiters:  # its client left
                self.ends["left"] += 1
                self._remove(waiter, served=False)
        return end

    def tick(self) -> None:
        """Send the waiting requests that may be sent now, and refuse those that have waited too
        long.
        """
        now_s, terms = self._clock(), self.terms()
        for waiter in [one for one in self._waiters if now_s >= one.until_s]:
            self._end(waiter, "late", self._late(waiter))
        by_base: dict[str, list[_ModelLine]] = {}
        for model, line in self._lines.items():
            if (served := self._served_as(line, model)) is not None:
                by_base.setdefault(self._workers.identity(served)[0], []).append(line)
        self._paces = {base: self._paces.get(base) or Pace(now_s) for base in by_base}
        for base, lines in by_base.items():
            pace = self._paces[base]
            room = pace.room(terms.per_s, max(self.ready_workers(base), 1), now_s)
            # Lines of one base model, as of its adapters, share its workers' slow start.
            in_turn = merge(*lines, key=_urgency) if len(lines) > 1 else iter(lines[0])
            for waiter in in_turn if room else ():
                if not self._is_served(waiter):
                    continue
                self._end(waiter, "served", None)
                pace.count_request()
                room -= 1
                if not room:
                    break
        self._log_waiting(now_s, terms)

    def _log_waiting(self, now_s: float, terms: WaitingSettings) -> None:
        """Log which requests wait because no worker takes them, for each model once a minute."""
        self._logged = {one: at_s for one, at_s in self._logged.items() if now_s < at_s + _TELL_S}
        for model, line in self._lines.items():
            if model in self._logged or self._served_as(line, model) is not None:
                continue
            self._logged[model] = now_s
            log.warning(
                "no worker takes requests of model %r: %s; requests that wait for one: %d, each "
                "for %g s at most (waiting.wait_s)",
                *(model, self._no_worker_reason(model), line.count, terms.wait_s),
            )

    def _served_as(self, line: _ModelLine, model: str) -> str | None:
        """Return a model with ready workers that could answer some requests of `line`; None if
        there is none.
        """
        if self.ready_workers(model):
            return model
        others = {other for waiter in line for other in waiter.others()}
        return min(filter(self.ready_workers, others), default=None)

    def _is_served(self, waiter: Waiter) -> bool:
        """Return True if a worker is ready for this request."""
        return any(map(self.ready_workers, (waiter.model, *waiter.others())))

    def turn_away(self, why: str) -> int:
        """Refuse all waiting requests, and all later ones, because the router stops. Return how
        many waited.
        """
        self._closed = why
        waiters = list(self._waiters)
        for waiter in waiters:
            self._end(waiter, "refused", Rejection(503, "shutting_down", why))
        return len(waiters)

    def _unknown(self, model: str) -> str:
        """Return an error text which says that a model is unknown, and lists the known models."""
        names = sorted(self.known.names())
        more = ", ..." if len(names) > _MODELS_NAMED else ""
        return (
            f"the model {model!r} does not exist; known: {', '.join(names[:_MODELS_NAMED])}{more}"
        )

    def _victims(
        self, arrival: Arrival, body_bytes: int, terms: WaitingSettings
    ) -> list[Waiter] | None:
        """Return the waiting requests that must be refused so that one more may wait; None if the
        new request must be refused instead.

        Less urgent requests are refused first, the newest first. Among equally urgent ones, it is
        the newest request of the tenant and model with the most requests for their weight, if these
        still have more than the new request's tenant and model.
        """
        over = len(self) + 1 - terms.requests
        over_bytes = self.bytes + body_bytes - terms.bytes
        if over <= 0 and over_bytes <= 0:
            return []
        if body_bytes > terms.bytes:
            return None
        less_urgent = [one for one in self._waiters if one.priority > arrival.priority]
        less_urgent.sort(key=lambda one: (one.priority, one.turn))
        victims: list[Waiter] = []
        while less_urgent and (over > 0 or over_bytes > 0):
            victims.append(less_urgent.pop())
            over, over_bytes = over - 1, over_bytes - victims[-1].body_bytes
        if over <= 0 and over_bytes <= 0:
            return victims
        if victims or over > 1 or (one := self._one_to_displace(arrival)) is None:
            return None
        return [one] if one.body_bytes >= over_bytes else None

    def _one_to_displace(self, arrival: Arrival) -> Waiter | None:
        """Return the waiting request that should be refused in favour of an equally urgent new one;
        None if there is none.
        """
        own = self._counts[arrival.priority, arrival.tenant, arrival.model] + 1
        newest: dict[tuple[int, str | None, str], Waiter] = {}
        for one in self._waiters:
            if one.priority == arrival.priority:
                newest[one.count_key] = one
        crowd = max(
            newest.values(), key=lambda one: self._counts[one.count_key] / one.weight, default=None
        )
        if crowd is None or self._counts[crowd.count_key] / crowd.weight <= own / arrival.weight:
            return None
        return crowd

    def _waiter(
        self,
        arrival: Arrival,
        body_bytes: int,
        began: Began,
        terms: WaitingSettings,
        others: Callable[[], frozenset[str]],
    ) -> Waiter:
        most_s = terms.wait_s if arrival.hold_s is None else min(arrival.hold_s, terms.wait_s)
        until_s = began.at_s + most_s
        wait_s: float | None = most_s
        if arrival.deadline_s is not None and arrival.deadline_s < until_s:
            until_s, wait_s = arrival.deadline_s, None
        return Waiter(
            arrival.model,
            others,
            arrival.tenant,
            arrival.priority,
            arrival.weight,
            max(arrival.prompt_tokens, 1) / arrival.weight,
            body_bytes,
            (False, 0.0, began.order),
            until_s,
            wait_s,
            asyncio.get_running_loop().create_future(),
        )

    def _late(self, waiter: Waiter) -> Rejection:
        """Return the refusal for a request that has waited for as long as it may."""
        if waiter.wait_s is None:
            return _LATE
        within = f"no worker of model {waiter.model!r} took requests within {waiter.wait_s:g} s"
        return Rejection(503, NOBODY_CAME, f"{within}: {self._no_worker_reason(waiter.model)}")

    def _no_worker_reason(self, model: str) -> str:
        """Return why no worker takes requests of a model, for people."""
        if halves := self._workers.halves_missing(model):
            return "; ".join(map(str, halves))
        states = sorted({worker.shown_state for worker in self._workers.serving(model)})
        return f"its workers are {' or '.join(states)}" if states else "it has none"

    def _end(self, waiter: Waiter, how: str, result: Rejection | None) -> None:
        if waiter.end.done():  # its client is just leaving
            return
        self.ends[how] += 1
        waiter.end.set_result(result)
        self._remove(waiter, served=result is None)

    def _remove(self, waiter: Waiter, served: bool) -> None:
        """Remove a request from the line of its model; `served` says whether it is sent to a
        worker.
        """
        del self._waiters[waiter]
        self.bytes -= waiter.body_bytes
        self._counts[waiter.count_key] -= 1
        if not self._counts[waiter.count_key]:
            del self._counts[waiter.count_key]
        line = self._lines[waiter.model]
        line.remove(waiter, served)
        if not line.count:
            del self._lines[waiter.model]


def _urgency(waiter: Waiter) -> int:
    return waiter.priority
