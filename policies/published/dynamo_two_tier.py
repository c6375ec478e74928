"""Dynamo's two tiers: the least loaded worker if loads are far apart, else the longest prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.order import places


@dataclass(frozen=True, slots=True)
class DynamoTwoTier:
    """The cost follows the first tier that applies; A is a worker's number of unfinished requests.

    1. most A - fewest A > `balance_abs`, and most A > `balance_rel` x fewest A: cost = A.
    2. The longest match is more than `match_threshold` of the prompt's blocks: the workers that
       hold it come first, ordered by A, then all others, ordered by A.
    3. Otherwise: cost = A.

    Source: ai-dynamo/dynamo 0c3850c (2026), policy `dynamo-two-tier-cost-fn`, which took the rule
    and its constants 0.5, 32 and 1.1 from SGLang's `cache_aware_zmq`. All comparisons are strict.

    The source gives ties to the first row; here they are broken at random. If KV events are
    missing, the known hits are used. No load is NaN, and no other signal is read.

    Spill depth: `balance_abs`, 32, beyond an idle worker; above it no request has affinity.
    """

    match_threshold: float = 0.5
    balance_abs: int = 32
    balance_rel: float = 1.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.match_threshold <= 1.0:
            raise ValueError(f"match_threshold is {self.match_threshold}; it must be in [0, 1]")
        if self.balance_abs < 0:
            raise ValueError(f"balance_abs is {self.balance_abs}; it must be 0 or more")
        if not 1.0 <= self.balance_rel < float("inf"):
            raise ValueError(f"balance_rel is {self.balance_rel}; it must be finite, 1 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        loads, hits = fleet.requests, fleet.hit_tokens
        least_loaded: Floats = loads.astype(np.float64)
        if not len(loads):
            return least_loaded
        most, fewest = int(loads.max()), int(loads.min())
        if most - fewest > self.balance_abs and most > self.balance_rel * fewest:
            return least_loaded
        # The last token of a prompt is never a hit, so a hit in all blocks is one token short.
        longest = int(hits.max())
        matched_blocks = -(-longest // request.block_size)
        if matched_blocks <= self.match_threshold * request.prompt_blocks:
            return least_loaded
        return places(hits < longest, loads)
