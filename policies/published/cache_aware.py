"""SGLang's cache-aware routing: the best match while loads are even, else the shortest queue.

Source: sgl-project/sglang router (2024) and lightseekorg/smg gateway (2026), policy cache_aware,
with the defaults of the command line; the library's defaults are 32, 1.1 and 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.published.homes import InsertedTokens
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class CacheAware:
    """Chooses the fewest requests if the pool is imbalanced, else the longest match, else the
    smallest tree.

    The longest match counts if it is above `match_threshold`. Ties of matches and trees go to the
    fewest requests.

    A pool is imbalanced in three cases: the most and the fewest requests of a worker differ by more
    than `balance_abs` and by a factor above `balance_rel`; a worker uses a share of KV memory above
    `kv_ceiling`; or these shares differ by more than `kv_spread`. A value of 1 turns off either of
    the last two; 0.9 and 0.5 are suggested. The tree holds the prompts that were sent to a worker
    (`InsertedTokens`), with at most `max_tree_tokens` tokens. This is the rule for workers without
    KV events, with matches from an exact index; with events, SMG takes any match, and the fewest
    requests if there is none. If KV events are missing, the known hits are used; an unknown share
    of KV memory triggers nothing.

    Spill depth: `balance_abs`. Beyond it no request uses the cache, even if its session has no part
    in the imbalance.
    """

    match_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    kv_ceiling: float = 1.0
    kv_spread: float = 1.0
    max_tree_tokens: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("match_threshold", "kv_ceiling", "kv_spread"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} is {share}; it must be in [0, 1]")
        for name, low in (("balance_abs", 0), ("balance_rel", 1), ("max_tree_tokens", 1)):
            value = getattr(self, name)
            if not low <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be finite, {low} or more")

    def initial_state(self) -> InsertedTokens:
        return InsertedTokens(self.max_tree_tokens)

    def observe(self, fact: Fact, state: InsertedTokens) -> InsertedTokens:
        state.observe(fact)
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: InsertedTokens) -> Floats:
        requests = fleet.requests
        if len(fleet) == 0 or self._imbalanced(fleet):
            return requests.astype(np.float64)
        hits = fleet.hit_tokens
        if hits.max() > self.match_threshold * request.prompt_tokens:
            return places(-hits, requests)
        return places(state.sizes(fleet), requests)

    def _imbalanced(self, fleet: FleetView) -> bool:
        most, least = int(fleet.requests.max()), int(fleet.requests.min())
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return True
        if self.kv_ceiling == 1.0 and self.kv_spread == 1.0:
            return False
        shares = fleet.kv_fraction[~np.isnan(fleet.kv_fraction)]
        if len(shares) == 0:
            return False
        fullest, emptiest = float(shares.max()), float(shares.min())
        return (self.kv_ceiling < 1.0 and fullest > self.kv_ceiling) or (
            self.kv_spread < 1.0 and fullest - emptiest > self.kv_spread
        )
