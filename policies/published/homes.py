"""Memories of published policies: the worker of each session, and each worker's part of a tree."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.facts import Dispatched, Fact, WorkerChange


class SessionHomes:
    """The worker of each session's latest dispatch, by tenant, for at most `max_sessions` sessions.

    Lifetime: process.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._home: OrderedDict[tuple[str | None, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._home)

    def observe(self, fact: Fact) -> None:
        """Remember the worker to which a request with a session was sent."""
        if type(fact) is not Dispatched or fact.session is None:
            return
        session = fact.tenant, fact.session
        self._home[session] = fact.worker_id
        self._home.move_to_end(session)
        if len(self._home) > self._max_sessions:
            self._home.popitem(last=False)

    def rows(self, request: RequestView, fleet: FleetView) -> Bools | None:
        """Return True for the worker of the request's session, or None if it has no row.

        The shape is bool[rows]. A worker that is gone, or may not take the request, is not among
        the rows. Its sessions are sent to another worker, and stay there.
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
    """The tokens that this router's dispatches added to each worker's part of a prompt tree.

    Routers without KV events keep a tree of the prompts they sent, and take its size for the
    content of a worker's cache. With an exact index the growth is known without the tree: the
    uncached tokens of each dispatch. A worker has at most `max_tokens`, because such trees drop the
    least recently used prompts beyond a size. There is one entry for each worker that got a request
    and is not gone. Lifetime: process.
    """

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._tokens: dict[int, float] = {}

    def observe(self, fact: Fact) -> None:
        """Count a dispatch, or forget a worker that is gone."""
        if type(fact) is Dispatched:
            tokens = self._tokens.get(fact.worker_id, 0.0) + fact.uncached_tokens
            self._tokens[fact.worker_id] = min(tokens, self._max_tokens)
        elif type(fact) is WorkerChange and fact.state == "gone":
            self._tokens.pop(fact.worker_id, None)

    def sizes(self, fleet: FleetView) -> Floats:
        """Return the tokens in each worker's part, float64[rows]; 0 without requests."""
        known = self._tokens
        return np.array([known.get(worker, 0.0) for worker in fleet.worker_id.tolist()])
