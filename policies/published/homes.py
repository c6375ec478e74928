"""Memories of published policies: each session's worker, and the tokens sent to each worker."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.facts import Dispatched, Fact, WorkerChange


class SessionHomes:
    """Remembers, for each session, the worker that got its latest request.

    Equal session names of two tenants are two sessions. Beyond `max_sessions` sessions, the session
    whose latest request is oldest is forgotten. Lifetime: process.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._home: OrderedDict[tuple[str | None, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._home)

    def observe(self, fact: Fact) -> None:
        """Remember the worker to which a request of a session was sent; ignore other facts."""
        if type(fact) is not Dispatched or fact.session is None:
            return
        session = fact.tenant, fact.session
        self._home[session] = fact.worker_id
        self._home.move_to_end(session)
        if len(self._home) > self._max_sessions:
            self._home.popitem(last=False)

    def rows(self, request: RequestView, fleet: FleetView) -> Bools | None:
        """Return True for the worker that got the session's latest request, bool[rows].

        Return None if the session is unknown, or if its worker is gone or may not take the request.
        Then the session's requests go to another worker from now on.
        """
        if request.session is None:
            return None
        home_id = self._home.get((request.tenant, request.session))
        if home_id is None:
            return None
        is_home: Bools = fleet.worker_id == home_id
        return is_home if np.count_nonzero(is_home) else None


def check_max_sessions(max_sessions: int) -> None:
    """Raise ValueError unless `max_sessions` is 1 or more."""
    if max_sessions < 1:
        raise ValueError(f"max_sessions is {max_sessions}; it must be 1 or more")


class InsertedTokens:
    """Counts the tokens that this router's dispatches added to the prompt tree of each worker.

    Published routers without KV events keep a tree of the prompts that they sent, and take its size
    as the size of a worker's cache. Here no tree is needed: it grows by the uncached tokens of each
    dispatch, which the cache index knows. A worker's count is at most `max_tokens`, because such
    trees drop the least recently used prompts when they are full. Removed workers are forgotten.
    Lifetime: process.
    """

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._tokens: dict[int, float] = {}

    def observe(self, fact: Fact) -> None:
        """Add the uncached tokens of a dispatch to its worker, or forget a worker that is gone."""
        if type(fact) is Dispatched:
            tokens = self._tokens.get(fact.worker_id, 0.0) + fact.uncached_tokens
            self._tokens[fact.worker_id] = min(tokens, self._max_tokens)
        elif type(fact) is WorkerChange and fact.state == "gone":
            self._tokens.pop(fact.worker_id, None)

    def sizes(self, fleet: FleetView) -> Floats:
        """Return the tokens added to each worker's prompt tree, float64[rows]; 0 if none."""
        known = self._tokens
        return np.array([known.get(worker, 0.0) for worker in fleet.worker_id.tolist()])
