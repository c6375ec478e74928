"""Ray Serve's prefix affinity: the best match while queues are level, two choices else.

Source: ray-project/ray, `PrefixCacheAffinityRouter` of Ray Serve LLM, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.power_of_two import PowerOfTwo
from policies.published.homes import InsertedTokens
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class RayPrefix:
    """Most and fewest requests more than `imbalance` apart: power of two choices. Else, a match of
    at least `match_threshold`: the longest. Else: the smallest part of the tree. Ties of the last
    two go to the fewest requests.

    The tree's parts are what was sent to each worker (`inserted`); nothing is evicted from it by
    default, and so it is here. Unknown hits count as what is known of them; no other signal is
    asked for.

    Spill depth: `imbalance`. Beyond it the cache counts for nobody.
    """

    imbalance: int = 10
    match_threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.imbalance < 0:
            raise ValueError(f"imbalance is {self.imbalance}; it must be 0 or more")
        if not 0.0 <= self.match_threshold <= 1.0:
            raise ValueError(f"match_threshold is {self.match_threshold}; it must be in [0, 1]")

    def initial_state(self) -> InsertedTokens:
        return InsertedTokens(float("inf"))

    def observe(self, fact: Fact, state: InsertedTokens) -> InsertedTokens:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: InsertedTokens) -> Floats:
        requests, hits = fleet.requests, fleet.hit_tokens
        if len(fleet) == 0 or int(requests.max()) - int(requests.min()) > self.imbalance:
            return PowerOfTwo().costs(request, fleet, None)
        longest = int(hits.max())
        if longest and longest >= self.match_threshold * request.prompt_tokens:
            return places(-hits, requests)
        return places(state.sizes(fleet), requests)
