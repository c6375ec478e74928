"""Holds requests until a worker should take them. The order is fair between tenants, and between
the groups of a tenant's requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

from policies.contract import Standing
from policies.facts import Arrival
from router.core.placement.group_turns import GroupTurns, group_of
from router.core.placement.pending import Pending

Turn = tuple[bool, float, int]

_OWED_MAX = 4_096  # most tenants without waiting requests whose tags are kept


class QueueMember(Protocol):
    """An item that waits in a fair queue.

    Its `turn` differs from that of every other item in the queue.
    """

    @property
    def turn(self) -> Turn:
        """The key by which the items of one tenant are sorted; the item with the lowest key is
        served first.
        """

    @property
    def fair_work(self) -> float:
        """The item's predicted work divided by its tenant's weight; above 0."""


M = TypeVar("M", bound=QueueMember)


@dataclass(slots=True, eq=False)
class Flow(Generic[M]):
    """The waiting items of one tenant, at least one, and the tenant's position in the fair queue.
    `start` is the start tag of start-time fair queueing: the tenant with the lowest tag is served
    next. Lifetime: as long as an item of the tenant waits.
    """

    start: float
    members: list[M] = field(default_factory=list)  # by their turns


class FairQueue(Generic[M]):
    """A queue that serves tenants in proportion to their weights (start-time fair queueing).

    Lifetime: as long as an item waits.
    """

    def __init__(self) -> None:
        self._flows: dict[str | None, Flow[M]] = {}
        self._kept_tags: dict[str | None, float] = {}  # tags of tenants with nothing waiting
        self._now = 0.0  # the start tag of the item that was served last

    def __bool__(self) -> bool:
        return bool(self._flows)

    def __iter__(self) -> Iterator[M]:
        for flow in self._flows.values():
            yield from flow.members

    def flow(self, tenant: str | None) -> Flow[M] | None:
        """Return the waiting items of a tenant, or None if there are none."""
        return self._flows.get(tenant)

    def flows(self) -> Iterator[Flow[M]]:
        """Return the waiting items of each tenant, as one `Flow` for each tenant."""
        return iter(self._flows.values())

    def add(self, tenant: str | None, member: M) -> None:
        """Add an item to the waiting items of a tenant."""
        flow = self._flows.get(tenant)
        if flow is None:
            start = max(self._now, self._kept_tags.pop(tenant, 0.0))
            flow = self._flows[tenant] = Flow(start)
        insort(flow.members, member, key=_turn)

    def remove(self, tenant: str | None, member: M) -> None:
        """Remove a waiting item of a tenant, because it is served or given up."""
        flow = self._flows[tenant]
        place = bisect_left(flow.members, member.turn, key=_turn)
        assert flow.members[place] is member, "not where its turn says"
        del flow.members[place]
        if not flow.members:
            del self._flows[tenant]
            self._remember_tag(tenant, flow.start)

    def served(self, tenant: str | None, fair_work: float, waited: bool) -> None:
        """Charge a tenant `fair_work` for a served request, so that other tenants are served before
        its next request. `waited` is True if the request waited in the queue; it must be removed
        only after this call.
        """
        flow = self._flows.get(tenant)
        if flow is None:
            self._remember_tag(tenant, max(self._now, self._kept_tags.get(tenant, 0.0)) + fair_work)
            return
        if waited:  # an item that did not wait does not show how far the others are
            self._now = max(self._now, flow.start)
        flow.start += fair_work

    def in_turn(self, gone: Callable[[M], bool]) -> Iterator[M]:
        """Return all waiting items in the order in which they would be served.

        The order assumes that each returned item is served. Items for which `gone` returns True
        when their turn comes are left out.
        """
        heap = [(flow.start, flow.members[0].turn, _Line(flow)) for flow in self._flows.values()]
        heapify(heap)
        while heap:
            _, _, line = heappop(heap)
            member = line.members[line.position]
            line.position += 1
            if not gone(member):
                before = line.flow.start
                yield member
                if line.flow.start == before:
                    line.ahead += member.fair_work
            if line.position < len(line.members):
                start = line.flow.start + line.ahead
                heappush(heap, (start, line.members[line.position].turn, line))

    def _remember_tag(self, tenant: str | None, tag: float) -> None:
        if tag > self._now:
            self._kept_tags[tenant] = tag
        if len(self._kept_tags) > _OWED_MAX:
            self._kept_tags = {t: tag for t, tag in self._kept_tags.items() if tag > self._now}
            while len(self._kept_tags) > _OWED_MAX:  # forgetting the smallest debt is least unjust
                del self._kept_tags[min(self._kept_tags, key=lambda t: self._kept_tags[t])]


class _Line(Generic[M]):
    """The waiting items of one tenant while `FairQueue.in_turn` goes through the queue.

    Lifetime: one call of `in_turn`.
    """

    def __init__(self, flow: Flow[M]) -> None:
        self.flow = flow
        self.members = tuple(flow.members)
        self.position = 0
        self.ahead = 0.0  # work of the items that were asked and stay


def _turn(member: QueueMember) -> Turn:
    return member.turn


REFUSED_MAX = 8  # most requests of one model that find no worker in one sweep
PASSED_S = 20.0  # a request that has waited longer is no longer passed by younger ones


class Watcher(Protocol):
    """Gets a call for each request that begins to wait at the router, or that is sent to a worker.
    `reservations.Reservations` implements this interface.
    """

    def waits(self, pending: Pending) -> None:
        """Handle the beginning of a request's wait."""

    def waits_no_more(self, pending: Pending) -> None:
        """Handle the end of a request's wait, for any reason."""

    def sent(self, pending: Pending) -> None:
        """Handle the dispatch of a request, whether it waited or not."""


class HoldQueue:
    """The requests that wait at the router for a worker, at most `limit`.

    Lifetime: process.
    """

    def __init__(self, limit: int, watcher: Watcher | None = None) -> None:
        self._limit = limit
        self._watcher = watcher
        self.size = 0
        self._classes: dict[int, FairQueue[Pending]] = {}  # the waiting requests by priority
        self._groups: dict[tuple[int, str | None], GroupTurns] = {}  # by priority and tenant
        self._models: Counter[str] = Counter()
        self.tokens = 0  # uncached tokens of all waiting prompts

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Pending]:
        """Return the waiting requests in the order in which they would be served now."""
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_turn(lambda pending: False)

    def sweep(self, now_s: float, refused_max: float = REFUSED_MAX) -> Iterator[Pending]:
        """Return the held requests that the caller should try to place again, most urgent first.

        A request that is still held when the next one is read has found no worker. After
        `refused_max` such requests of a model, no more requests of the model are returned. One such
        request is enough if it has waited for long, so that no later request passes it. Requests of
        other models continue, because their workers may have room. With `refused_max` infinite, all
        requests are returned.
        """
        refused: defaultdict[str, float] = defaultdict(float)
        done = 0  # models of which no further request is returned

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
                    long = refused_max < inf and now_s - pending.arrival.now_s > PASSED_S
                    refused[model] += refused_max if long else 1
                    done += refused[model] >= refused_max
                if done >= len(self._models):
                    return

    def requests(self) -> list[int]:
        """Return the ids of the waiting requests, in the order in which they would be served."""
        return [pending.arrival.request_id for pending in self]

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait."""
        return self._models[model]

    def standings(self) -> Counter[Standing]:
        """Return the number of waiting requests for each standing: new, cold or warm.

        The standing says if a request begins a session, or if its session has lost or still has a
        cache.
        """
        return Counter(pending.standing for pending in self)

    @property
    def full(self) -> bool:
        """True if the queue has as many requests as it may have."""
        return self.size >= self._limit

    def add(self, pending: Pending) -> None:
        """Hold a request. The queue must not be full."""
        assert not self.full, "asked to hold beyond the limit"
        pending.held = True
        arrival = pending.arrival
        turns = self._classes.get(arrival.priority)
        if turns is None:
            turns = self._classes[arrival.priority] = FairQueue()
        groups = self._groups.setdefault((arrival.priority, arrival.tenant), GroupTurns())
        # A request that is held again, because its worker failed, keeps its place.
        start = min(groups.begins(group_of(arrival), pending.work_tokens), pending.turn[1])
        pending.turn = (pending.standing == "new", start, pending.serial)
        turns.add(arrival.tenant, pending)
        self.size += 1
        self._models[arrival.model] += 1
        self.tokens += pending.queued_tokens
        if self._watcher is not None:
            self._watcher.waits(pending)

    def remove(self, pending: Pending) -> None:
        """Stop holding a request, because it is dispatched, has expired or is displaced, or because
        its client left.
        """
        arrival = pending.arrival
        turns = self._classes[arrival.priority]
        turns.remove(arrival.tenant, pending)
        line = arrival.priority, arrival.tenant
        self._groups[line].ends(group_of(arrival))
        if turns.flow(arrival.tenant) is None:
            del self._groups[line]
        if not turns:  # the tags of this priority are dropped with its last request
            del self._classes[arrival.priority]
        pending.held = False
        self.size -= 1
        self._models[arrival.model] -= 1
        if not self._models[arrival.model]:
            del self._models[arrival.model]
        self.tokens -= pending.queued_tokens
        if self._watcher is not None:
            self._watcher.waits_no_more(pending)

    def served(self, pending: Pending) -> None:
        """Charge the tenant and the group of a request that is sent, so that their next requests
        come later.
        """
        if self._watcher is not None:
            self._watcher.sent(pending)
        arrival = pending.arrival
        turns = self._classes.get(arrival.priority)
        if turns is not None:
            turns.served(arrival.tenant, pending.fair_work, pending.held)
        groups = self._groups.get((arrival.priority, arrival.tenant))
        if groups is not None:
            groups.served(group_of(arrival), pending.work_tokens, pending.held)

    def victim(self, arrival: Arrival) -> Pending | None:
        """Return the held request that should give way to `arrival` if there is no room for both,
        or None. It is the newest of the least important held requests. Such a request has a lower
        priority than `arrival`, or belongs to the tenant that has the most requests for its weight,
        if these are more than the tenant of `arrival` would then have for its weight.
        """
        if not self._classes:
            return None
        lowest = max(self._classes)
        if lowest < arrival.priority:
            return None
        turns = self._classes[lowest]
        flow = max(turns.flows(), key=_weighted_waiting)
        if lowest == arrival.priority:
            own = turns.flow(arrival.tenant)
            after = (1 if own is None else len(own.members) + 1) / arrival.weight
            if flow is own or _weighted_waiting(flow) <= after:
                return None
        return flow.members[-1]

    def work_before(self, arrival: Arrival, begun: bool) -> float:
        """Return the tokens of work that would be done before `arrival` if it were the last of its
        tenant's requests. Only requests of the same model count, and only those whose sessions have
        begun, or have not, like the session of `arrival` (`begun`). Of requests with the same
        priority, only as much work counts as fair sharing between tenants would serve before it.
        """

        def work(waiting: Iterable[Pending]) -> float:
            model, new = arrival.model, not begun
            return sum(
                p.work_tokens for p in waiting if p.turn[0] is new and p.arrival.model == model
            )

        more_urgent = (turns for p, turns in self._classes.items() if p < arrival.priority)
        before = sum(work(turns) for turns in more_urgent)
        same = self._classes.get(arrival.priority)
        if same is None:
            return before
        own = same.flow(arrival.tenant)
        mine = 0.0 if own is None else work(own.members)
        weights = sum(f.members[0].arrival.weight for f in same.flows() if f is not own)
        return before + min(work(same), mine * (1 + weights / arrival.weight))

    def expired(self, now_s: float, hold_s: float) -> list[Pending]:
        """Return the requests that have waited as long as allowed, or whose deadline has passed."""
        return [
            p
            for p in self
            if now_s - p.arrival.now_s >= most_s(p.arrival, hold_s)
            or (p.arrival.deadline_s is not None and now_s >= p.arrival.deadline_s)
        ]


def most_s(arrival: Arrival, hold_s: float) -> float:
    """Return the longest time in seconds that a request may wait at the router.

    `hold_s` is the general limit, and the request may have a lower one.
    """
    return hold_s if arrival.hold_s is None else min(arrival.hold_s, hold_s)


def _weighted_waiting(flow: Flow[Pending]) -> float:
    """Return the number of a tenant's waiting requests, divided by the tenant's weight."""
    return len(flow.members) / flow.members[0].arrival.weight
