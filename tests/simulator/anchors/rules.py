"""A routing rule from a published result that is not one of our built-in policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class TierScorers:
    """llm-d's scorers from its guide to CPU offloading (2026): queue, KV, GPU prefix and CPU
    prefix. All four have the same weight. A prefix on the GPU counts twice, because host memory
    there holds a copy of it. The guide's fifth scorer, which spreads prompts that no worker holds,
    is left out.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        waiting = fleet.waiting.astype(np.float64)
        spread = waiting.max() - waiting.min()
        queue = (waiting.max() - waiting) / spread if spread else np.ones(len(waiting))
        kv = 1.0 - np.nan_to_num(fleet.kv_fraction, nan=0.0)
        tokens = 2 * fleet.hit_tokens + fleet.hit_tokens_host
        costs: Floats = -(queue + kv + tokens / max(request.prompt_tokens, 1))
        return costs
