"""Preble's E2: exploits workers with most of the prompt cached, else explores the cheapest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import Bools, FleetView, Floats, RequestView
from policies.published.preble_window import PrebleWindow

Terms = dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Preble:
    """Cost in seconds = prefill sent in the window + requests * median output * step + own prefill.

    Exploit: if some workers hold more of the prompt than they miss, all others cost +inf. Explore:
    otherwise all workers are open. The first two terms are a worker's load: the prefill time of all
    requests that were sent to it in the last `window_s` seconds, attention included, and the decode
    time of its unfinished requests, by the median answer of the pool.

    A prefix gets a replica after `warmup_requests` requests per worker, if the largest load is
    above `imbalance` times the smallest, the largest load is a holder's, and the prefix's mean time
    to first token in the newer half of the window is `ttft_ratio` times that of the older half.
    Then the least loaded workers may be chosen, too. The prefix is the request's large prefix
    (`preble_window`) that was served most often.

    Source: Preble (UC San Diego, arXiv 2407.00023, 2024), global scheduler. In the source the
    window's cost is summed over prefixes, misses only, which equals the prefill sent. The source
    can also move nodes instead of copying them, and charge for recomputing what a prompt evicts:
    neither is done here.

    Spill depth: no number of requests. A prefix that is most of a prompt spreads when load and time
    to first token both show it: after the warm-up, and half a window after its first request.

    Unknown hits count as the known ones, a lower bound. Until an answer has reported its tokens,
    decoding costs nothing; times to first token are those of streaming answers.
    """

    window_s: float = 180.0
    imbalance: float = 1.5
    ttft_ratio: float = 2.0
    warmup_requests: int = 50

    def __post_init__(self) -> None:
        if not 0.0 < self.window_s < float("inf"):
            raise ValueError(f"window_s is {self.window_s}; it must be finite, above 0")
        for name in ("imbalance", "ttft_ratio"):
            if not 1.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite, 1 or more")
        if self.warmup_requests < 0:
            raise ValueError(f"warmup_requests is {self.warmup_requests}; it must be 0 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: PrebleWindow) -> Floats:
        terms = self.terms(request, fleet, state)
        loads = terms["window_s"] + terms["decode_s"]
        costs: Floats = loads + terms["prefill_s"]
        holders: Bools = 2 * fleet.hit_tokens > request.prompt_tokens
        if np.count_nonzero(holders) in (0, len(fleet)):
            return costs
        if self._grows(request, loads, holders, state):
            holders |= loads <= loads.min()
        costs[~holders] = np.inf
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: PrebleWindow) -> Terms:
        """Return the parts of the cost in seconds: past prefills, decode, and the new prefill.

        The past prefills are those sent to the worker in the last minutes. A worker with a low sum
        may still be excluded.
        """
        sums, none, pair_tokens = state.work.totals, (0.0, 0.0), fleet.pair_tokens
        found = [sums.get(worker_id, none) for worker_id in fleet.worker_id.tolist()]
        work_tokens = np.array([new + pair_tokens * pairs for new, pairs in found])
        cached = np.minimum(fleet.hit_tokens, request.prompt_tokens - 1)
        return {
            "window_s": work_tokens / fleet.prefill_tokens_per_s,
            "decode_s": fleet.requests * fleet.step_s * state.median_output_tokens,
            "prefill_s": fleet.prefill_s(request.prompt_tokens - cached, cached),
        }

    def _grows(
        self, request: RequestView, loads: Floats, holders: Bools, state: PrebleWindow
    ) -> bool:
        """Return True if the least loaded workers should get a copy of the request's prefix, too.

        `loads` are the loads in seconds, and `holders` is True for workers with the prefix,
        bool[rows].
        """
        most = loads.max()
        early = state.dispatches < self.warmup_requests * len(loads)
        if early or most <= self.imbalance * loads.min() or not holders[loads >= most].any():
            return False
        served = state.ttft.totals
        nodes = [node for node in state.large_nodes(request.chain) if node in served]
        if not nodes:
            return False
        before_s, now_s = state.ttft.halves(max(nodes, key=lambda node: served[node][1]))
        return now_s >= self.ttft_ratio * before_s  # NaN: too early to tell

    def initial_state(self) -> PrebleWindow:
        return PrebleWindow(self.window_s)

    def observe(self, fact: Any, state: PrebleWindow) -> PrebleWindow:
        state.observe(fact)
        return state
