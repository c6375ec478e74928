"""llm-d's optimized baseline: prefers workers with the cache until their backlog is far longer.

Source: llm-d/llm-d-router 066c20e (2026), `prefix-cache-affinity-filter` before the
`token-load-scorer`, as the guide optimized-baseline ships them: match 0.80, 18,000 ms, 15,928
tokens/s. Described in llm-d's blog, "Sticky until saturated", August 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from policies.contract import FleetView, Floats, RequestView

Load = Literal["tokens", "requests"]


@dataclass(frozen=True, slots=True)
class LlmDSticky:
    """The cost is queued prefill tokens + missing prompt tokens; workers with the cache come first.

    Workers with the cache hold at least `match_threshold` of the prompt's blocks. They come first
    unless they are saturated: then the shortest backlog among them exceeds the shortest of all
    workers by more than `patience_s` seconds; with 0 they are never saturated. A backlog drains at
    `tokens_per_s`. The default is the source's rate of Qwen3-32B on two H100, used for all workers;
    other rates are 39,065 for gpt-oss-120b on an H100 and 24,027 for GLM-5.2 on eight B200. `none`
    uses each worker's calibrated rate. With `load` "requests" the cost is the number of unfinished
    requests, as the source advises if decoding is the bottleneck.

    The source's token load is capped at 4,194,304 tokens, beyond which all workers are equal; here
    it is not. Ties are broken at random, as in the source. If KV events are missing, the known hits
    are used; no signal that the policy reads can be NaN.

    Spill depth: `patience_s` seconds of prefill, 286,704 tokens with the defaults. Decoding
    requests do not count, because they are no backlog.
    """

    match_threshold: float = 0.8
    patience_s: float = 18.0
    tokens_per_s: float | None = 15_928.0
    load: str = "tokens"

    def __post_init__(self) -> None:
        if not 0.0 < self.match_threshold <= 1.0:
            raise ValueError(f"match_threshold is {self.match_threshold}; it must be in (0, 1]")
        if not 0.0 <= self.patience_s < float("inf"):
            raise ValueError(f"patience_s is {self.patience_s}; it must be finite, 0 or more")
        if self.tokens_per_s is not None and not 0.0 < self.tokens_per_s < float("inf"):
            raise ValueError(
                f"tokens_per_s is {self.tokens_per_s}; it must be finite and above 0, or none"
            )
        if self.load not in get_args(Load):
            raise ValueError(f"load is {self.load!r}; it must be {' or '.join(get_args(Load))}")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        queued, hits = fleet.queued_prefill_tokens, fleet.hit_tokens
        costs: Floats
        if self.load == "tokens":
            costs = queued + np.maximum(request.prompt_tokens - hits, 1)
        else:
            costs = fleet.requests.astype(np.float64)
        # The last token of a prompt is never a hit, so a hit in all blocks is one token short.
        hit_blocks = -(-hits // request.block_size)
        sticky = hit_blocks >= max(self.match_threshold * request.prompt_blocks, 1)
        if not np.count_nonzero(sticky):
            return costs
        rate = fleet.prefill_tokens_per_s if self.tokens_per_s is None else self.tokens_per_s
        backlog_s = queued / rate
        behind_s = backlog_s[sticky].min() - backlog_s.min()
        if behind_s <= self.patience_s or not self.patience_s:
            costs[~sticky] += costs.max() + 1.0
        return costs
