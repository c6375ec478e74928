"""Keeps requests until a worker of their model takes requests, then lets them go by and by.

It is the answer to scaling to zero: an engine takes minutes to start, and until then its requests
are kept here, within bounds of their number, their bytes and their time. The most urgent go first,
and tenants get their shares, as among requests that wait for room at workers
(`router.core.placement.hold_queue`). The first worker is not given all of them at once (`pace`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from policies.facts import Arrival
from router.core.contract.actions import Rejection
from router.core.placement.admission import DISPLACED
from router.core.placement.hold_queue import FairQueue
from router.core.workers.table import WorkerTable, serves
from router.waiting.known_models import KnownModels
from router.waiting.pace import Pace
from router.waiting.settings import WaitingSettings

MODELS_COUNTED, OTHERS = 1_000, "(others)"  # whose requests are counted apart, and all others
FULL, NOBODY_CAME = "worker_wait_full", "no_worker_available"
_MODELS_NAMED = 8  # in an error
_LATE = Rejection(504, "deadline_exceeded", "no worker was there in the client's time")


class Began(NamedTuple):
    """When a request first began to wait, which bounds its wait however often it goes on."""

    at_s: float
    order: int  # of no other request; smaller ones came before


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. Lifetime: as long as it waits."""

    model: str
    others: frozenset[str]  # models whose workers would do as well
    tenant: str | None
    priority: int
    fair_work: float  # its prompt by its tenant's weight
    body_bytes: int
    turn: tuple[bool, int]  # its place among its tenant's
    ready_s: float  # it goes no sooner
    until_s: float  # it is refused then
    wait_s: float | None  # for so long it may wait; None: its client's deadline ends its wait
    end: asyncio.Future[Rejection | None]  # None: it may go on


class _ModelLine:
    """The waiting requests of one model. Lifetime: as long as one waits."""

    def __init__(self) -> None:
        self.by_priority: dict[int, FairQueue[Waiter]] = {}
        self.count = 0
        self.pace: Pace | None = None  # while a worker is there

    def __iter__(self) -> Iterator[Waiter]:
        """Return those that still wait, in the order in which they would go."""
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

    def last(self) -> Waiter:
        """Return the newest of the least urgent ones."""
        least = self.by_priority[max(self.by_priority)]
        return max(least, key=lambda waiter: waiter.turn)


class WorkerWait:
    """The requests that wait for a worker of their model. Lifetime: process."""

    def __init__(
        self,
        workers: WorkerTable,
        known: KnownModels,
        clock: Callable[[], float],
        terms: Callable[[], WaitingSettings],
    ) -> None:
        """Let nobody wait yet.

        clock: returns seconds, on the clock of arrivals.
        terms: returns the bounds in force.
        """
        self.known = known
        self.ends: Counter[str] = Counter(
            dict.fromkeys(("served", "late", "refused", "displaced", "left"), 0)
        )
        self.bytes = 0  # of bodies
        self._workers = workers
        self._clock = clock
        self.terms = terms
        self.requests: Counter[str] = Counter()  # of known models that came, by model
        self._lines: dict[str, _ModelLine] = {}
        self._closed = ""  # why nobody may wait any more
        self._version = -1
        self._ready: dict[str, int] = {}  # by model that is served; as old as `_version`

    def __len__(self) -> int:
        return sum(line.count for line in self._lines.values())

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait here."""
        line = self._lines.get(model)
        return 0 if line is None else line.count

    def ready_workers(self, model: str) -> int:
        """Return how many workers of a model are ready and not silent.

        Return 0 as well if these cannot serve a request, because only one of two roles is there.
        """
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._ready.clear()
        ready = self._ready.get(model)
        if ready is None:
            serving = self._workers.serving(model)
            there = [w.facts for w in serving if w.state == "ready" and w.silent is None]
            ready = len(there) if serves(there) else 0
            if serving:  # a client may name any number of others
                self._ready[model] = ready
        return ready

    def arrives(self, arrival: Arrival) -> bool:
        """Count a request, and return True if it has to `wait` before the core is asked."""
        model, requests = arrival.model, self.requests
        if model in requests:
            requests[model] += 1
        elif model in self.known:
            requests[model if len(requests) < MODELS_COUNTED else OTHERS] += 1
        # Of most requests these look-ups are all: workers are as they were, and nobody waits.
        if self._version == self._workers.version and self._ready.get(model) and not self._lines:
            return False
        if model not in self._lines and self.ready_workers(model):
            return False
        return self.may_wait(arrival) or (self.is_promised() and model not in self.known)

    def is_promised(self, model: str | None = None) -> bool:
        """Return True if a model is one of `waiting.models`; None: if there is any of these.

        Its operator wants its requests to come here, though it has no worker.
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
        least_s: float = 0.0,
        others: frozenset[str] = frozenset(),
    ) -> Rejection | None:
        """Wait until the request may go to a worker; else return why it is refused.

        least_s: seconds that it waits whatever workers are there, as one just failed it.
        others: models whose workers would do as well.
        Cancelling the call ends the wait.
        """
        now_s, terms = self._clock(), self.terms()
        if arrival.model not in self.known:
            return Rejection(404, "model_not_found", self._unknown(arrival.model))
        if self._closed:
            return Rejection(503, "shutting_down", self._closed)
        if not self._has_room(arrival, body_bytes, terms):
            self.ends["refused"] += 1
            why = f"{len(self)} requests wait for a first worker already"
            return Rejection(503, FULL, why)
        waiter = self._waiter(arrival, body_bytes, began, now_s + least_s, terms, others)
        line = self._lines.setdefault(waiter.model, _ModelLine())
        line.add(waiter)
        self.bytes += body_bytes
        end = None
        try:
            end = await waiter.end
        finally:
            left = not waiter.end.done() or waiter.end.cancelled()
            if left:
                self.ends["left"] += 1
            self._remove(waiter, served=not left and end is None)
        return end

    def tick(self) -> None:
        """Let those go that may, and refuse those that have waited for too long."""
        now_s, terms = self._clock(), self.terms()
        for model, line in list(self._lines.items()):
            for waiter in list(line):
                if now_s >= waiter.until_s:
                    self._end(waiter, "late", self._late(waiter))
            workers = self._workers_for(line, model)
            if not workers:
                line.pace = None
                continue
            pace = line.pace = line.pace or Pace(now_s)
            room = pace.room(terms.per_s, workers, now_s)
            for waiter in line if room else ():
                if waiter.ready_s > now_s or not self._is_served(waiter):
                    continue
                self._end(waiter, "served", None)
                pace.went()
                room -= 1
                if not room:
                    break

    def _workers_for(self, line: _ModelLine, model: str) -> int:
        """Return how many workers are ready for the requests that wait for a model."""
        workers = self.ready_workers(model)
        if workers:
            return workers
        others = {other for waiter in line for other in waiter.others}
        return sum(map(self.ready_workers, others))

    def _is_served(self, waiter: Waiter) -> bool:
        """Return True if a worker is ready for this request."""
        return any(map(self.ready_workers, (waiter.model, *waiter.others)))

    def turn_away(self, why: str) -> int:
        """Refuse those that wait, and all later ones, because the router stops.

        Return how many waited.
        """
        self._closed = why
        waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            self._end(waiter, "refused", Rejection(503, "shutting_down", why))
        return len(waiters)

    def _unknown(self, model: str) -> str:
        """Return a text that says that a model is not known, and which ones are."""
        names = sorted(self.known.names())
        more = ", ..." if len(names) > _MODELS_NAMED else ""
        return (
            f"the model {model!r} does not exist; known: {', '.join(names[:_MODELS_NAMED])}{more}"
        )

    def _has_room(self, arrival: Arrival, body_bytes: int, terms: WaitingSettings) -> bool:
        """Return True if one more may wait; one that is less urgent may have to give way."""

        def is_full() -> bool:
            return len(self) >= terms.requests or self.bytes + body_bytes > terms.bytes

        while body_bytes <= terms.bytes and is_full():
            lasts = [line.last() for line in self._lines.values()]
            victim = max(lasts, key=lambda w: (w.priority, w.turn), default=None)
            if victim is None or victim.priority <= arrival.priority:
                return False
            self._end(victim, "displaced", DISPLACED)
        return body_bytes <= terms.bytes

    def _waiter(
        self,
        arrival: Arrival,
        body_bytes: int,
        began: Began,
        ready_s: float,
        terms: WaitingSettings,
        others: frozenset[str],
    ) -> Waiter:
        most_s = terms.wait_s if arrival.hold_s is None else min(arrival.hold_s, terms.wait_s)
        until_s = began.at_s + most_s
        wait_s: float | None = most_s
        if arrival.deadline_s is not None and arrival.deadline_s < until_s:
            until_s, wait_s = arrival.deadline_s, None
        return Waiter(
            arrival.model,
            others - {arrival.model},
            arrival.tenant,
            arrival.priority,
            max(arrival.prompt_tokens, 1) / arrival.weight,
            body_bytes,
            (False, began.order),
            ready_s,
            until_s,
            wait_s,
            asyncio.get_running_loop().create_future(),
        )

    def _late(self, waiter: Waiter) -> Rejection:
        """Return the refusal of a request that has waited for as long as it may."""
        if waiter.wait_s is None:
            return _LATE
        states = sorted({worker.shown_state for worker in self._workers.serving(waiter.model)})
        there = f"its workers are {' or '.join(states)}" if states else "it has none"
        if halves := self._workers.halves_missing(waiter.model):
            there = "; ".join(map(str, halves))
        within = f"no worker of model {waiter.model!r} took requests within {waiter.wait_s:g} s"
        return Rejection(503, NOBODY_CAME, f"{within}: {there}")

    def _end(self, waiter: Waiter, how: str, result: Rejection | None) -> None:
        self.ends[how] += 1
        waiter.end.set_result(result)
        self._remove(waiter, served=result is None)

    def _remove(self, waiter: Waiter, served: bool) -> None:
        """Take a request out of its line, unless this was done before."""
        if waiter.body_bytes < 0:
            return
        self.bytes -= waiter.body_bytes
        waiter.body_bytes = -1
        line = self._lines[waiter.model]
        line.remove(waiter, served)
        if not line.count:
            del self._lines[waiter.model]
