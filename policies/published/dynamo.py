"""Dynamo's default rule: blocks to compute, less a credit for cached blocks, plus blocks in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.contract import FleetView, Floats, RequestView
from policies.published.active_blocks import ActiveBlocks
from policies.published.dynamo_prefill import DynamoPrefill


@dataclass(frozen=True, slots=True)
class Dynamo(DynamoPrefill):
    """Cost in blocks = (prefill term + charge per request) / B + blocks in use with this request.

    Source: NVIDIA Dynamo 1.6, KV router (2026). The prefill term, its credits and the charge are
    those of `DynamoPrefill.prefill_tokens`; B is the block size, and `decay` above 0 is Dynamo's
    overlap decay. Blocks in use are the prompts of unfinished requests and this one's; a block that
    several share counts once (`active_blocks`). The charge per request is given in tokens, so that
    it does not grow with the size of a block: 1024 are Dynamo's 64 blocks of 16. Dynamo's softmax
    over scaled costs is our `temperature`.

    Spill depth: S / (u + request_tokens) at the defaults, for a prefix of S tokens with u tokens
    behind it, if no prefill is queued.

    Unknown hits count as the known ones, a lower bound. No signal that the policy reads can be
    absent. Dispatches of other routers count only in the charge per request.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: ActiveBlocks) -> Floats:
        terms = self.terms(request, fleet, state)
        costs: Floats = terms["prefill_blocks"] + terms["in_use_blocks"]
        return costs

    def terms(
        self, request: RequestView, fleet: FleetView, state: ActiveBlocks
    ) -> dict[str, Floats]:
        """Return the two parts of the cost in blocks: prefill blocks and blocks in use.

        The prefill blocks include the charge for each unfinished request.
        """
        in_use = state.beyond(request.chain, fleet.worker_id)
        in_use += request.prompt_tokens / request.block_size
        prefill = self.prefill_tokens(request, fleet)
        prefill /= request.block_size
        return {"prefill_blocks": prefill, "in_use_blocks": in_use}

    def initial_state(self) -> ActiveBlocks:
        return ActiveBlocks()

    def observe(self, fact: Any, state: ActiveBlocks) -> ActiveBlocks:
        state.observe(fact)
        return state
