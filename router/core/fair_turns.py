"""Start-time fair queueing of tenants (Goyal, Vin, Cheng, SIGCOMM 1996), by work and weight.

Each tenant that has something waiting has a start tag; the least one is next. Work done for a
tenant moves its tag on by that work over its weight, so over any time in which two tenants have
something waiting their work differs from the ratio of their weights by one request each at most.
One that comes back begins at the tag of who was served last: being away earns nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

_OWED_MAX = 4_096  # tenants without anything waiting whose tags are kept


class Member(Protocol):
    """Something that waits. Its turn is unique among all members of its queue."""

    @property
    def turn(self) -> tuple[bool, int]:
        """Its place within its tenant's line."""
        ...

    @property
    def fair_work(self) -> float:
        """Its predicted work over its tenant's weight, above 0."""
        ...


M = TypeVar("M", bound=Member)


@dataclass(slots=True, eq=False)
class Flow(Generic[M]):
    """One tenant's line, never empty. Lifetime: as long as something of it waits."""

    start: float
    members: list[M] = field(default_factory=list)  # by their turns


class FairTurns(Generic[M]):
    """Lifetime: as long as anything waits."""

    def __init__(self) -> None:
        self._flows: dict[str | None, Flow[M]] = {}
        self._owed: dict[str | None, float] = {}  # tags of tenants with nothing waiting
        self._now = 0.0  # the start tag of who was served last

    def __bool__(self) -> bool:
        return bool(self._flows)

    def __iter__(self) -> Iterator[M]:
        for flow in self._flows.values():
            yield from flow.members

    def flow(self, tenant: str | None) -> Flow[M] | None:
        """A tenant's line."""
        return self._flows.get(tenant)

    def flows(self) -> Iterator[Flow[M]]:
        """Every tenant's line."""
        return iter(self._flows.values())

    def add(self, tenant: str | None, member: M) -> None:
        """Something begins to wait."""
        flow = self._flows.get(tenant)
        if flow is None:
            start = max(self._now, self._owed.pop(tenant, 0.0))
            flow = self._flows[tenant] = Flow(start)
        insort(flow.members, member, key=_turn)

    def remove(self, tenant: str | None, member: M) -> None:
        """It waits no more, whatever became of it."""
        flow = self._flows[tenant]
        place = bisect_left(flow.members, member.turn, key=_turn)
        assert flow.members[place] is member, "not where its turn says"
        del flow.members[place]
        if not flow.members:
            del self._flows[tenant]
            self._owe(tenant, flow.start)

    def served(self, tenant: str | None, fair_work: float, waited: bool) -> None:
        """Something of this tenant is done; what waited is removed only after this."""
        flow = self._flows.get(tenant)
        if flow is None:
            self._owe(tenant, max(self._now, self._owed.get(tenant, 0.0)) + fair_work)
            return
        if waited:  # whoever did not wait says nothing of how far the others are
            self._now = max(self._now, flow.start)
        flow.start += fair_work

    def in_turn(self, gone: Callable[[M], bool]) -> Iterator[M]:
        """All members in the order of their turns, as if each were served, or is meanwhile.

        Those of whom `gone` is true when their turn comes are left out.
        """
        heap = [(flow.start, flow.members[0].turn, _Line(flow)) for flow in self._flows.values()]
        heapify(heap)
        while heap:
            _, _, line = heappop(heap)
            member = line.members[line.asked]
            line.asked += 1
            if not gone(member):
                before = line.flow.start
                yield member
                if line.flow.start == before:
                    line.ahead += member.fair_work
            if line.asked < len(line.members):
                start = line.flow.start + line.ahead
                heappush(heap, (start, line.members[line.asked].turn, line))

    def _owe(self, tenant: str | None, tag: float) -> None:
        if tag > self._now:
            self._owed[tenant] = tag
        if len(self._owed) > _OWED_MAX:
            self._owed = {t: tag for t, tag in self._owed.items() if tag > self._now}
            while len(self._owed) > _OWED_MAX:  # the least is the least injustice
                del self._owed[min(self._owed, key=lambda t: self._owed[t])]


class _Line(Generic[M]):
    """A tenant's line while it is gone through. Lifetime: one pass."""

    def __init__(self, flow: Flow[M]) -> None:
        self.flow = flow
        self.members = tuple(flow.members)
        self.asked = 0
        self.ahead = 0.0  # work of those asked that stay


def _turn(member: Member) -> tuple[bool, int]:
    return member.turn
