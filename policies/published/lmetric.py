"""LMetric: prefill tokens times batch size, with an extra copy of a prefix that becomes too hot.

Source: LMetric (Shanghai Jiao Tong University and Alibaba, arXiv 2603.15202, 2026), in the variant
whose token factor counts queued prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.facts import Dispatched
from policies.published.recent import HotClasses, class_of


@dataclass(frozen=True, slots=True)
class LMetric:
    """The cost is max(1, queued prefill + missing tokens) * (unfinished requests + 1).

    There are no weights, because they would cancel in the comparison. `queued=false` leaves the
    queued prefill out. The cost is in tokens, so a worker at half speed looks as good as any other.
    With `hot_spots`, requests that share their first `class_blocks` blocks are one class. Let x be
    the class's share of the last `window` dispatches, and let m of N workers hold these blocks. A
    class is too hot if x / (1 - x) > m / (N - m). If it is, and its last 2 m requests all went to
    workers that hold the blocks, these workers cost +inf for one request; the copy that this makes
    is held by one more worker. Dispatches to holders before the class became hot count as well.
    Spill depth without queued prefill: (P - H_idle) / (P - H) - 1 requests, with P prompt tokens
    and H hit tokens of the holder; this is S / u for a prefix of S tokens with u tokens behind it.
    By hot spots, the spill depth is 2 m requests, unless other classes fill most of the window.
    Unknown hits count as the known ones, a lower bound; tokens in host memory and on disk count as
    missing. No signal that the policy reads can be absent.
    """

    queued: bool = True
    hot_spots: bool = True
    class_blocks: int = 4
    window: int = 1000

    def __post_init__(self) -> None:
        for name in ("class_blocks", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: HotClasses) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["tokens"] * terms["batch_requests"]
        if self.hot_spots:
            too_hot = self._too_hot(request, fleet, state)
            if too_hot is not None:
                costs[too_hot] = np.inf
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: HotClasses) -> dict[str, Floats]:
        """Return the two factors of the cost: tokens and requests.

        A worker with a low product may still be excluded, if it holds a prefix that is too popular.
        """
        tokens = float(request.prompt_tokens) - fleet.hit_tokens
        if self.queued:
            tokens += fleet.queued_prefill_tokens
        return {"tokens": np.maximum(tokens, 1.0), "batch_requests": fleet.requests + 1.0}

    def _too_hot(self, request: RequestView, fleet: FleetView, state: HotClasses) -> Bools | None:
        """Return True for each worker that must not get this request because it has the prefix.

        The shape is bool[rows]. The request's prefix is then so popular that another worker should
        get a copy. Return None if no worker is excluded.
        """
        key = class_of(request.chain, self.class_blocks)
        wins = state.wins.get(key, 0)
        if wins < 2:  # fewer than one holder needs: most requests return here
            return None
        blocks = min(self.class_blocks, request.prompt_blocks)
        # Where the prompt is nothing but these blocks, its last token never counts as a hit.
        depth = min(blocks * request.block_size, request.prompt_tokens - 1)
        holders: Bools = fleet.hit_tokens >= depth
        m = int(np.count_nonzero(holders))
        others, mine = len(fleet) - m, state.counts.get(key, 0)
        if m == 0 or others == 0 or wins < 2 * m:
            return None
        return holders if mine * others > (len(state.recent) - mine) * m else None

    def initial_state(self) -> HotClasses:
        return HotClasses(self.window, self.class_blocks)

    def observe(self, fact: Any, state: HotClasses) -> HotClasses:
        if type(fact) is Dispatched:
            state.dispatched(fact)
        return state
