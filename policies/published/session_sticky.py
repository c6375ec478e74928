"""Session stickiness: a session stays with its worker; a new session joins the shortest queue.

Source: classic (cookies of load balancers); among routers of LLM requests
vllm-project/production-stack's session router (2025) and llm-d's session affinity (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.homes import SessionHomes, check_max_sessions


@dataclass(frozen=True, slots=True)
class SessionSticky:
    """The cost is -1 for the worker that served the session last; for others, their requests.

    A request goes to the worker with the fewest requests if it has no session, if its session is
    not among the `max_sessions` last used, or if the session's worker may not take it; its session
    then stays there. The policy reads neither the caches nor any other signal.

    Spill depth: a session never spills; there is no affinity between sessions, whatever they share.
    """

    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        check_max_sessions(self.max_sessions)

    def initial_state(self) -> SessionHomes:
        return SessionHomes(self.max_sessions)

    def observe(self, fact: Fact, state: SessionHomes) -> SessionHomes:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: SessionHomes) -> Floats:
        costs = fleet.requests.astype(np.float64)
        home = state.rows(request, fleet)
        if home is not None:
            costs[home] = -1.0
        return costs
