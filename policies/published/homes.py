"""The memories of published policies: the worker of each session, and the tokens sent to each
worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import inf

import numpy as np

from policies.contract import Bools, FleetView, Floats, Ints, RequestView
from policies.facts import Dispatched, Fact, WorkerChange


class Homes:
    """Remembers, for each key, the worker that got the latest request with that key.

    A key that had no request for `idle_s` seconds is forgotten. Beyond `max_keys` keys, the one
    whose latest request is oldest is forgotten. Lifetime: process.
    """

    def __init__(self, max_keys: int, idle_s: float = inf) -> None:
        self._max_keys = max_keys
        self._idle_s = idle_s
        self._home: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()  # worker, last use

    def __len__(self) -> int:
        return len(self._home)

    def bind(self, key: Hashable, worker_id: int, now_s: float) -> None:
        """Remember `worker_id` as the worker of `key`, which had a request at `now_s`."""
        self._home[key] = worker_id, now_s
        self._home.move_to_end(key)
        if len(self._home) > self._max_keys:
            self._home.popitem(last=False)
        while now_s - next(iter(self._home.values()))[1] >= self._idle_s:
            self._home.popitem(last=False)

    def rows(self, key: Hashable, now_s: float, fleet: FleetView) -> Bools | None:
        """Return True for the worker of `key`, bool[rows].

        Return None if the key is unknown or forgotten, or if its worker is not in `fleet`.
        """
        home = self._home.get(key)
        if home is None or now_s - home[1] >= self._idle_s:
            return None
        is_home: Bools = fleet.worker_id == home[0]
        return is_home if np.count_nonzero(is_home) else None


class SessionHomes:
    """Remembers, for each session, the worker that got its latest request.

    Equal session names of two tenants are two sessions. Beyond `max_sessions` sessions, the session
    whose latest request is oldest is forgotten. Lifetime: process.
    """

    def __init__(self, max_sessions: int) -> None:
        self._homes = Homes(max_sessions)

    def __len__(self) -> int:
        return len(self._homes)

    def observe(self, fact: Fact) -> None:
        """Remember the worker to which a request of a session was sent; ignore other facts."""
        if type(fact) is Dispatched and fact.session is not None:
            self._homes.bind((fact.tenant, fact.session), fact.worker_id, fact.now_s)

    def rows(self, request: RequestView, fleet: FleetView) -> Bools | None:
        """Return True for the worker that got the session's latest request, bool[rows].

        Return None if the session is unknown, or if its worker is gone or may not take the request.
        Then the session's requests go to another worker from now on.
        """
        if request.session is None:
            return None
        return self._homes.rows((request.tenant, request.session), request.now_s, fleet)


class SiblingHomes:
    """Remembers one worker for all sub-agents of a parent, and one for each other session.

    A request with a parent is a sub-agent's: it reads and moves the worker of its siblings only,
    whatever its own session is. The parent's own requests have their own session's worker. Equal
    names of two tenants differ. At most `max_keys` sessions and as many groups of siblings are
    remembered, the latest used; a group without a request for `group_idle_s` seconds is forgotten.
    Lifetime: process.
    """

    def __init__(self, max_keys: int, group_idle_s: float = inf) -> None:
        self._sessions = SessionHomes(max_keys)
        self._groups = Homes(max_keys, group_idle_s)

    def __len__(self) -> int:
        return len(self._sessions) + len(self._groups)

    def observe(self, fact: Fact) -> None:
        """Remember the worker to which a request was sent; ignore other facts."""
        if type(fact) is not Dispatched or fact.parent is None:
            self._sessions.observe(fact)
        else:
            self._groups.bind((fact.tenant, fact.parent), fact.worker_id, fact.now_s)

    def rows(self, request: RequestView, fleet: FleetView) -> Bools | None:
        """Return True for the worker of the request's siblings, or else of its session, bool[rows].

        Return None if there is none, or if that worker is gone or may not take the request.
        """
        if request.parent is None:
            return self._sessions.rows(request, fleet)
        return self._groups.rows((request.tenant, request.parent), request.now_s, fleet)


def keep_below(loads: Ints, home: Bools | None, max_requests: int, move_margin: int) -> Floats:
    """Return costs that keep `home` while its load allows it, float64[rows].

    `loads` are unfinished requests, int64[rows]. The cost is the load; that of `home` is -1 while
    its load is at most `max_requests`, or while no other worker has `move_margin` fewer requests.
    """
    costs = loads.astype(np.float64)
    if home is not None:
        load = int(loads[home][0])
        if load <= max_requests or load - int(loads.min()) < move_margin:
            costs[home] = -1.0
    return costs


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
