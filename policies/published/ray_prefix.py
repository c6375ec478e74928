"""Ray Serve's prefix affinity: the best match while queues are level, else the better of two.

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
    """Chooses the longest match while queues are level, else by power of two choices.

    Queues are level if the most and the fewest requests are at most `imbalance` apart. A match must
    be at least `match_threshold` of the prompt; without one, the worker with the smallest part of
    the prompt tree is chosen. Ties go to the fewest requests.

    A worker's part of the tree is the tokens that were sent to it (`InsertedTokens`); the source
    evicts nothing from it by default, and neither does this policy. If KV events are missing, the
    known hits are used; no other signal is read.

    Spill depth: `imbalance`. Beyond it no request uses the cache.
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
