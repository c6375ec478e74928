"""Hybrid: the work a request brings and the work it finds, in seconds of each worker's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.thresholds import check_thresholds, reached_thresholds


@dataclass(frozen=True, slots=True)
class Hybrid:
    """cost [s] = (missing + load_factor * (queued + requests * step_tokens)) / own prefill rate.

    All terms are prefill tokens, so the cost is seconds at the worker's own speed. Missing plus
    queued is Llumnix's cache-aware dispatch; it is blind to decode, so every unfinished request
    counts one decode step, as the tokens that could be computed in it: what it costs the newcomer
    and what the newcomer costs it. Missing tokens are priced by how many workers hold them
    (`missing_tokens`). Unknown hits are a lower bound and taken as they are; host and disk tiers
    count as missing.

    Spill depth of a prefix of H tokens on m workers, queues drained: each holder may have
    H / (m * step_tokens * load_factor) requests more than an idle worker before that gets one.

    load_factor: missing tokens that a token of load is worth, 0 or more.
    max_requests, max_queued_tokens, max_kv_fraction: a worker that has reached one gets +inf
    while another is below its own (`policies.thresholds`); None = no limit. The worker's own
    limits go first.
    """

    load_factor: float = 1.0
    max_requests: float | None = None
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_factor < float("inf"):
            raise ValueError(f"load_factor is {self.load_factor}; it must be finite, 0 or more")
        check_thresholds(self.max_requests, self.max_queued_tokens, self.max_kv_fraction)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        # The pool's median, not the worker's own step: token gaps grow with every prefill beside
        # them, which `queued` counts already. With its own, a busy worker is charged twice, a quiet
        # one attracts everybody, and near saturation the load swings between them.
        step_tokens = _median(fleet.step_s * fleet.prefill_tokens_per_s)
        # All unfinished requests, not the running ones only: one whose prefill should be over by
        # the model, but whose first token has not come yet, would otherwise weigh nothing.
        load_tokens = fleet.queued_prefill_tokens + fleet.requests * step_tokens
        work_tokens = missing_tokens(request, fleet) + self.load_factor * load_tokens
        costs: Floats = work_tokens / fleet.prefill_tokens_per_s
        reached = reached_thresholds(
            fleet, self.max_requests, self.max_queued_tokens, self.max_kv_fraction
        )
        if reached is not None:
            costs[reached] = np.inf
        return costs


def missing_tokens(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: prompt tokens a worker lacks, each at 1 / (workers that hold it); at least 1.

    At full price nobody would ever copy a popular prefix: a hit is the better choice for each
    single request, so a few holders serve everyone while other workers stay idle. But a copy
    serves those who come after, too, and how many workers hold a prefix tells how much it is in
    demand. So once m workers hold a token, a further copy counts 1 / m of its prefill. What one
    worker alone holds, as it does a conversation, keeps its full price.
    """
    hit_tokens = fleet.hit_tokens
    if len(hit_tokens) == 0:
        return np.zeros(0)
    order = hit_tokens.argsort()
    depths = hit_tokens[order]
    # The last token is computed even if all are resident: its logits give the next one.
    if depths[-1] >= request.prompt_tokens:
        depths = np.minimum(depths, request.prompt_tokens - 1)
    steps = depths.copy()
    steps[1:] -= depths[:-1]
    # Between the hits of neighbours in this order, the tokens are held by all further rows.
    priced = np.add.accumulate(steps / np.arange(len(depths), 0, -1))
    missing = np.empty(len(depths))
    # Plain numbers: a scalar of numpy's own makes an operation take half as long again.
    missing[order] = (float(priced[-1]) - priced) + float(request.prompt_tokens - int(depths[-1]))
    return missing


def _median(values: Floats) -> float:
    """The median, 0 of no values: as numpy's own, but a tenth of its time on a few values."""
    rows = len(values)
    if rows == 0:
        return 0.0
    ordered = values.copy()
    ordered.sort()  # NaN comes last
    if ordered[-1] != ordered[-1]:
        return float("nan")
    return float(ordered[rows // 2] + ordered[(rows - 1) // 2]) / 2
