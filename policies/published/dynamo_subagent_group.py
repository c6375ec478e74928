"""Dynamo's sub-agent groups: siblings share a worker, chosen independently of their parent's."""

from __future__ import annotations

from dataclasses import dataclass

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.homes import SiblingHomes, check_max_sessions, keep_below

LONGEST_IDLE_S = 31_536_000.0  # a year, the source's limit


@dataclass(frozen=True, slots=True)
class DynamoSubagentGroup:
    """The cost is the number of unfinished requests; -1 for the siblings' worker, unless it is
    full.

    The key of a request with a parent is that parent, so that all its sub-agents share a worker.
    The first of them goes to the worker with the fewest requests, wherever the parent is. If the
    worker has more than `max_requests` and another one has fewer requests, the request goes
    elsewhere, and the group follows. A group without a request for `idle_s` seconds is forgotten. A
    request without a parent stays with its own session's worker by the same limit.

    Source: ai-dynamo/dynamo abf607a (2026), policy `dynamo-subagent-group-affinity`: 32 requests,
    300 s, at most 65,536 groups. There are two differences. Beyond that number of groups the source
    remembers no new one until others have expired; here the group that was used longest ago is
    forgotten. In the source a request that only one worker could take moves no group; here it does,
    because a `Dispatched` fact does not show that there was only one.

    The source gives ties to the lower worker id; here they are broken at random. No signal that the
    policy reads can be absent: no load is NaN, and hits are not read.

    Spill depth: `max_requests`, 32, for siblings or one session; there is no affinity between
    others.
    """

    max_requests: int = 32
    idle_s: float = 300.0
    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        if self.max_requests < 0:
            raise ValueError(f"max_requests is {self.max_requests}; it must be 0 or more")
        if not 0.0 < self.idle_s <= LONGEST_IDLE_S:
            raise ValueError(f"idle_s is {self.idle_s}; it must be in (0, {LONGEST_IDLE_S:.0f}]")
        check_max_sessions(self.max_sessions)

    def initial_state(self) -> SiblingHomes:
        return SiblingHomes(self.max_sessions, self.idle_s)

    def observe(self, fact: Fact, state: SiblingHomes) -> SiblingHomes:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: SiblingHomes) -> Floats:
        return keep_below(fleet.requests, state.rows(request, fleet), self.max_requests, 1)
