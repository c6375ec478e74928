"""Consistent hashing with bounded loads: takes the first worker on the hash ring that has room.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016); as a
router of prefixes: KubeAI, strategy PrefixHash, 2025, with load 125 % and 256 nodes a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.hashing import distances
from policies.published.prefix_hash import check_ring


@dataclass(frozen=True, slots=True)
class Chwbl:
    """The cost is the distance on the ring from the prefix to the worker, 0..1; plus 1 if it has no
    room.

    A worker has room for one more request up to ceil(load_factor * (all requests + 1) / workers).
    These limits add up to more than all requests, so some worker always has room. KubeAI leaves out
    the ceil: with fewer requests than workers, no worker has room there, and the owner takes all.

    The key is the prompt's first `prefix_tokens` tokens (`hashing.distances`). KubeAI takes 100
    characters of the first user message, which only KubeAI itself can tell from the system prompt
    before it. A prompt without a full block goes to the worker with the fewest requests. The policy
    reads neither the caches nor any other signal.

    Spill depth: bounded by the load of the pool: load_factor times its mean, rounded up. All
    requests beyond it go to the same next worker on the ring, while that has room.
    """

    prefix_tokens: int = 256
    load_factor: float = 1.25
    nodes: int = 256

    def __post_init__(self) -> None:
        check_ring(self.prefix_tokens, self.load_factor, self.nodes)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        requests = fleet.requests
        if len(fleet) == 0 or request.prompt_blocks == 0:
            return requests.astype(np.float64)
        mean = (int(requests.sum()) + 1) / len(fleet)
        room = np.ceil(self.load_factor * mean)
        way = distances(request, fleet, self.prefix_tokens, self.nodes)
        costs: Floats = way + (requests + 1 > room)
        return costs
