"""SMG's prefix hash: the hash ring's worker for the first tokens, unless its load is too high.

Source: lightseekorg/smg gateway, policy prefix_hash, 2026, with 150 nodes per worker on its ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.hashing import distances


@dataclass(frozen=True, slots=True)
class PrefixHash:
    """The cost is the number of unfinished requests, but -1 for the owner of the prompt's
    beginning.

    The owner is the hash ring's worker for the first `prefix_tokens` tokens.

    If the owner has more than load_factor * (all requests + 1) / workers requests, its cost is its
    requests, too, so that the least loaded worker is taken. A prompt without a full block has no
    key and goes to the least loaded worker. The policy reads neither the caches nor any other
    signal.

    Spill depth: bounded by the load of the pool, load_factor times its mean. Every request beyond
    that goes to the least loaded worker, which is another one each time.
    """

    prefix_tokens: int = 256
    load_factor: float = 1.25
    nodes: int = 150

    def __post_init__(self) -> None:
        check_ring(self.prefix_tokens, self.load_factor, self.nodes)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        requests = fleet.requests.astype(np.float64)
        if len(fleet) == 0 or request.prompt_blocks == 0:
            return requests
        owner = int(distances(request, fleet, self.prefix_tokens, self.nodes).argmin())
        if requests[owner] <= self.load_factor * (requests.sum() + 1.0) / len(fleet):
            requests[owner] = -1.0
        return requests


def check_ring(prefix_tokens: int, load_factor: float, nodes: int) -> None:
    """Raise ValueError if a parameter of the hash ring is outside its valid range."""
    if prefix_tokens < 1:
        raise ValueError(f"prefix_tokens is {prefix_tokens}; it must be 1 or more")
    if not 1.0 <= load_factor < float("inf"):
        raise ValueError(f"load_factor is {load_factor}; it must be finite, 1 or more")
    if not 1 <= nodes <= 4096:
        raise ValueError(f"nodes is {nodes}; it must be in 1..4096")
