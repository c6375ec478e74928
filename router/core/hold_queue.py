"""Requests that no worker should take just now, asked again on every finish and tick.

More important ones go first. Among those of one priority tenants take turns (`fair_turns`), so that
a thousand requests of one tenant are no wait for another's first. Within a tenant, and without
tenants, sessions that have begun go before new ones, then the oldest goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from policies.contract import Standing
from policies.facts import Arrival
from router.core.fair_turns import FairTurns, Flow
from router.core.mirror import Prediction
from router.estimators.sessions import Visit

REFUSED_MAX = 8  # of one model in one sweep
PASSED_S = 20.0  # one that has waited for longer is not passed by younger ones any more


@dataclass(slots=True, eq=False)
class Pending:
    """A request the core has accepted and not finished. Lifetime: request."""

    arrival: Arrival
    serial: int
    draw: float
    tried: set[int] = field(default_factory=set)  # workers that failed it
    attempts: int = 0  # of these, those that were reached
    not_before_s: float = float("-inf")  # when it may be sent again
    sent_s: float = float("-inf")  # when it was dispatched
    worker_id: int | None = None  # where it is dispatched
    held: bool = False
    visit: Visit | None = None  # to its session, where these are followed
    standing: Standing = "new"  # of its session, when it was last decided about
    prediction: Prediction | None = None  # of its worker's cache, where that is mirrored
    work_tokens: float = 1.0  # predicted: what it must compute, and its answer
    queued_tokens: int = 0  # of its prompt, to be computed; while it waits, as was predicted
    turn: tuple[bool, int] = (True, 0)  # its place in its tenant's line, since it began to wait

    @property
    def fair_work(self) -> float:
        """Work as its tenant's weight makes it count."""
        return self.work_tokens / self.arrival.weight


class Watcher(Protocol):
    """Who wants to know who waits, and who passes them (`kept.KeptWorkers`)."""

    def waits(self, pending: Pending) -> None:
        """It begins to wait."""
        ...

    def waits_no_more(self, pending: Pending) -> None:
        """It does so no more, however that ended."""
        ...

    def sent(self, pending: Pending) -> None:
        """A request is sent, whether it waited or not."""
        ...


class HoldQueue:
    """Bounded in number. Lifetime: process."""

    def __init__(self, limit: int, watcher: Watcher | None = None) -> None:
        self._limit = limit
        self._watcher = watcher
        self._size = 0
        self._classes: dict[int, FairTurns[Pending]] = {}  # by priority, those that wait in it
        self._models: Counter[str] = Counter()
        self.tokens = 0  # of prompts that wait, as far as these must be computed

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Pending]:
        """Those who wait, in the order of their turns if nothing changes."""
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_turn(lambda pending: False)

    def sweep(self, now_s: float, refused_max: int = REFUSED_MAX) -> Iterator[Pending]:
        """The requests to ask again: most urgent first, of each model until a few were refused.

        One that is still held when the next one is wanted counts as refused; one that has waited
        for long is not passed any more. Another model's requests must not wait behind them: its
        pool may well have room.
        """
        refused: Counter[str] = Counter()
        done = 0  # models of which nobody is asked any more

        def gone(pending: Pending) -> bool:
            return not pending.held

        for priority in sorted(self._classes):
            turns = self._classes.get(priority)
            for pending in () if turns is None else turns.in_turn(gone):
                model = pending.arrival.model
                if refused[model] >= refused_max:
                    continue
                yield pending
                if pending.held:
                    long = now_s - pending.arrival.now_s > PASSED_S
                    refused[model] += refused_max if long else 1
                    done += refused[model] >= refused_max
                if done >= len(self._models):
                    return

    def requests(self) -> list[int]:
        """The numbers of those who wait, in the order of their turns."""
        return [pending.arrival.request_id for pending in self]

    def standings(self) -> Counter[Standing]:
        """How many wait, by the standing of their session."""
        return Counter(pending.standing for pending in self)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._size >= self._limit

    def add(self, pending: Pending) -> None:
        """Hold a request. The queue must not be full."""
        assert not self.full, "asked to hold beyond the limit"
        pending.held = True
        pending.turn = (pending.standing == "new", pending.serial)
        arrival = pending.arrival
        turns = self._classes.get(arrival.priority)
        if turns is None:
            turns = self._classes[arrival.priority] = FairTurns()
        turns.add(arrival.tenant, pending)
        self._size += 1
        self._models[arrival.model] += 1
        self.tokens += pending.queued_tokens
        if self._watcher is not None:
            self._watcher.waits(pending)

    def remove(self, pending: Pending) -> None:
        """Stop holding a request (dispatched, expired, displaced, or its client left)."""
        arrival = pending.arrival
        turns = self._classes[arrival.priority]
        turns.remove(arrival.tenant, pending)
        if not turns:  # what was owed in this rush is forgotten with it
            del self._classes[arrival.priority]
        pending.held = False
        self._size -= 1
        self._models[arrival.model] -= 1
        if not self._models[arrival.model]:
            del self._models[arrival.model]
        self.tokens -= pending.queued_tokens
        if self._watcher is not None:
            self._watcher.waits_no_more(pending)

    def served(self, pending: Pending) -> None:
        """A request is sent, whether it waited or not: its tenant's next turn comes later."""
        if self._watcher is not None:
            self._watcher.sent(pending)
        turns = self._classes.get(pending.arrival.priority)
        if turns is not None:
            turns.served(pending.arrival.tenant, pending.fair_work, pending.held)

    def victim(self, arrival: Arrival) -> Pending | None:
        """Who should give way to `arrival` where there is no room for both; None: nobody.

        The newest of the least important ones: of a lower priority; or of the tenant that has the
        most for its weight, where that is more than the newcomer's would have then.
        """
        if not self._classes:
            return None
        lowest = max(self._classes)
        if lowest < arrival.priority:
            return None
        turns = self._classes[lowest]
        flow = max(turns.flows(), key=_crowd)
        if lowest == arrival.priority:
            own = turns.flow(arrival.tenant)
            after = (1 if own is None else len(own.members) + 1) / arrival.weight
            if flow is own or _crowd(flow) <= after:
                return None
        return flow.members[-1]

    def work_before(self, arrival: Arrival) -> float:
        """Tokens of work that would be done before `arrival`, were it last of its tenant's line.

        Of its own priority no more than its tenant's share makes it wait for.
        """
        before = 0.0
        for priority, turns in self._classes.items():
            if priority < arrival.priority:
                before += sum(p.work_tokens for p in turns)
        turns_of = self._classes.get(arrival.priority)
        if turns_of is None:
            return before
        same = sum(p.work_tokens for p in turns_of)
        own = turns_of.flow(arrival.tenant)
        mine = 0.0 if own is None else sum(p.work_tokens for p in own.members)
        weights = sum(f.members[0].arrival.weight for f in turns_of.flows() if f is not own)
        return before + min(same, mine * (1 + weights / arrival.weight))

    def expired(self, now_s: float, hold_s: float) -> list[Pending]:
        """Those that waited `hold_s` or longer, or past their deadline."""
        return [
            p
            for p in self
            if now_s - p.arrival.now_s >= hold_s
            or (p.arrival.deadline_s is not None and now_s >= p.arrival.deadline_s)
        ]


def _crowd(flow: Flow[Pending]) -> float:
    """How many of a tenant wait, for its weight."""
    return len(flow.members) / flow.members[0].arrival.weight
