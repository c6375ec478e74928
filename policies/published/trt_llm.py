"""TensorRT-LLM's cache-aware router: the cached share of the prompt, less a charge for requests.

Source: NVIDIA/TensorRT-LLM, `serve` router of kind kv_cache_aware, 2025 and 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView

AHEAD = 1e-7  # more than a tie of `policies.pick`, less than any real difference


@dataclass(frozen=True, slots=True)
class TrtLlm:
    """The cost is requests / max_batch_size - hit tokens / padded prompt; ties are won in turn.

    The padded prompt is the prompt without its last token, rounded up to whole blocks: the most
    that can match. Among equal rows the arrival's serial number picks the winner, so the winner
    depends on the order of rows. If KV events are missing, the known hits are used; no other signal
    is read.

    Spill depth for H hit tokens of L: max_batch_size * H / L requests. A match counts at most 1,
    however long it is: 54 requests gather on the holder of 85 % of a prompt, whether that is 500
    tokens or 50,000.
    """

    max_batch_size: int = 64

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}; it must be 1 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["load"] + terms["match"]
        if len(costs):
            tied = np.flatnonzero(costs == costs.min())
            costs[tied[request.serial % len(tied)]] -= AHEAD
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the two parts of the cost: load and match.

        Load is the number of unfinished requests per place in the batch. Match is minus the share
        of the prompt that is cached. Ties are broken later.
        """
        size = request.block_size
        padded = max(-(-(request.prompt_tokens - 1) // size) * size, 1)
        return {"load": fleet.requests / self.max_batch_size, "match": fleet.hit_tokens / -padded}
