"""JSEW: Dynamo's rule with blocks in use weighed as the work that they have still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Dispatched
from policies.published.active_blocks import ActiveBlocks
from policies.published.dynamo_prefill import DynamoPrefill


class JsewMemory:
    """The memory of the policy JSEW: blocks in use, and the uncached share of recent prompts.

    Lifetime: the policy's.
    """

    def __init__(self) -> None:
        self.active = ActiveBlocks()
        self.uncached_share = 0.0


@dataclass(frozen=True, slots=True)
class Jsew(DynamoPrefill):
    """cost [blocks] = (prefill term + charge per request) / B
                     + (context_weight + prefill_weight * e) * c,

    u = D * A ** batch_exponent, c = u * (u / mean of u) ** skew_exponent. D: blocks in use with
    this request, each counted once, which the power of A, unfinished requests with this one, counts
    more often, as steps read them; e: uncached share of the prompts routed so far, smoothed by
    `smoothing` a request from 0 on. The rest is `Dynamo`'s.

    Source: NVIDIA Dynamo 1.6 (2026), selection plug-in "JSEW", tuned there on 290 random points of
    one trace of 1,200 coding sessions on 16 workers. We read its moving average, uncached tokens
    over request blocks, as blocks over blocks: only a share leaves all terms blocks.

    Spill depth: has no closed form. One of two workers with a prefix of 6,400 tokens, requests of
    640 more behind it, queue drained, e = 0: 3 requests, where `Dynamo` has 10.

    Unknown hits are a lower bound, taken as they are. No signal that it asks for can be absent;
    what other routers sent counts in A only.
    """

    context_weight: float = 1.526
    prefill_weight: float = 17.6
    batch_exponent: float = 0.13
    skew_exponent: float = 0.2
    smoothing: float = 0.01737

    def __post_init__(self) -> None:
        DynamoPrefill.__post_init__(self)
        if self.smoothing > 1.0:
            raise ValueError(f"smoothing is {self.smoothing}; it must be at most 1")

    def costs(self, request: RequestView, fleet: FleetView, state: JsewMemory) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["prefill_blocks"] + terms["work_blocks"]
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: JsewMemory) -> dict[str, Floats]:
        """Return the two parts of the cost in blocks: prefill blocks and work of the blocks in use.

        The prefill blocks include the charge for each unfinished request.
        """
        prefill = self.prefill_tokens(request, fleet)
        prefill /= request.block_size
        work: Floats = state.active.beyond(request.chain, fleet.worker_id)
        work += request.prompt_tokens / request.block_size  # never 0 then
        work *= (fleet.requests + 1.0) ** self.batch_exponent
        if len(work):
            work *= (work / (work.sum() / len(work))) ** self.skew_exponent
        work *= self.context_weight + self.prefill_weight * state.uncached_share
        return {"prefill_blocks": prefill, "work_blocks": work}

    def initial_state(self) -> JsewMemory:
        return JsewMemory()

    def observe(self, fact: Any, state: JsewMemory) -> JsewMemory:
        state.active.observe(fact)
        if type(fact) is Dispatched:
            share = fact.uncached_tokens / (fact.hit_tokens + fact.uncached_tokens)
            state.uncached_share += self.smoothing * (share - state.uncached_share)
        return state
