"""Dynamo's load guard: a session stays with its worker while that worker has few requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.homes import SessionHomes, SiblingHomes, check_max_sessions, keep_below

Binding = Literal["parent_group", "session"]


@dataclass(frozen=True, slots=True)
class DynamoLoadGuard:
    """The cost is the number of unfinished requests; -1 for the bound worker, unless it has too
    many.

    The bound worker has too many requests if it has more than `max_requests` and another worker has
    at least `move_margin` fewer. Then, as without a binding, the worker with the fewest requests
    wins.

    Source: ai-dynamo/dynamo 1aa6b64 (2026), policy `dynamo-soft-affinity-load-guard`: 32 requests,
    margin 2, at most 65,536 bindings. `binding` is its `--router-session-affinity-binding`: with
    "parent_group" all sub-agents of one parent share a binding, which is not their parent's; with
    "session" each session has its own. A dispatch moves the binding, as in the source. Bindings in
    the source may also end after a time without requests, but not by default.

    The source gives ties to the lower worker id; here they are broken at random. No signal that the
    policy reads can be absent: no load is NaN, and hits are not read. A request without a session,
    or whose bound worker may not take it, goes to the worker with the fewest requests.

    Spill depth: `max_requests`, 32, for one session or siblings; there is no affinity between
    others.
    """

    max_requests: int = 32
    move_margin: int = 2
    binding: str = "parent_group"
    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        if self.max_requests < 0:
            raise ValueError(f"max_requests is {self.max_requests}; it must be 0 or more")
        if self.move_margin < 1:
            raise ValueError(f"move_margin is {self.move_margin}; it must be 1 or more")
        if self.binding not in get_args(Binding):
            known = " or ".join(get_args(Binding))
            raise ValueError(f"binding is {self.binding!r}; it must be {known}")
        check_max_sessions(self.max_sessions)

    def initial_state(self) -> SessionHomes | SiblingHomes:
        by_session = cast(Binding, self.binding) == "session"
        return (SessionHomes if by_session else SiblingHomes)(self.max_sessions)

    def observe(
        self, fact: Fact, state: SessionHomes | SiblingHomes
    ) -> SessionHomes | SiblingHomes:
        state.observe(fact)
        return state

    def costs(
        self, request: RequestView, fleet: FleetView, state: SessionHomes | SiblingHomes
    ) -> Floats:
        home = state.rows(request, fleet)
        return keep_below(fleet.requests, home, self.max_requests, self.move_margin)
