"""How much of a prefix tree is each worker's: the tokens that were new to it when it got them."""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView, Floats
from policies.facts import Dispatched, Fact, WorkerChange


class InsertedTokens:
    """Worker id -> tokens added to its part of the tree by our dispatches. Lifetime: process.

    Routers without KV events keep a tree of the prompts they sent and take its size for what a
    worker's cache holds. With an exact index the growth is known without the tree: the uncached
    tokens of each dispatch. At most `max_tokens` a worker, as such trees drop the least recently
    used beyond a size. One entry for each worker that got a request and is not gone.
    """

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._tokens: dict[int, float] = {}

    def observe(self, fact: Fact) -> None:
        """Count a dispatch; forget a worker that is gone."""
        if type(fact) is Dispatched:
            tokens = self._tokens.get(fact.worker_id, 0.0) + fact.uncached_tokens
            self._tokens[fact.worker_id] = min(tokens, self._max_tokens)
        elif type(fact) is WorkerChange and fact.state == "gone":
            self._tokens.pop(fact.worker_id, None)

    def sizes(self, fleet: FleetView) -> Floats:
        """float64[rows]: tokens of each worker's part; 0 for one that never got a request."""
        known = self._tokens
        return np.array([known.get(worker, 0.0) for worker in fleet.worker_id.tolist()])
