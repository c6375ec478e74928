"""Dynamo's default: blocks to compute, less credit for what is cached, plus blocks in use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.active_blocks import ActiveBlocks


@dataclass(frozen=True, slots=True)
class Dynamo:
    """cost [blocks] = prefill_scale * max(0, (queued prefill + prompt) / B - credit)
                     + blocks in use with this request + request_tokens / B * unfinished requests,

    credit = overlap_credit * fade * hits / B + host_credit * host hits / B + disk_credit * disk
    hits / B, and fade = 1 / (1 + decay * (queued - least queued) / prompt): the more a worker is
    behind the least busy one, the less its hits count.

    Source: NVIDIA Dynamo 1.6, KV router (2026). Its softmax over scaled costs is our `temperature`.
    Blocks in use are the prompts of unfinished requests and this one's; those that several share
    count once (`active_blocks`). The extra charge per request is given in tokens, so that it does
    not grow with the size of a block: 1024 are Dynamo's 64 blocks of 16.

    Spill depth: S / (u + request_tokens) at the defaults, for a prefix of S and u tokens behind it,
    queue drained.

    Unknown hits are a lower bound, taken as they are. No signal that it asks for can be absent;
    what other routers sent counts in `requests` only.
    """

    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    request_tokens: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{field.name} is {value}; it must be finite, 0 or more")

    def costs(self, request: RequestView, fleet: FleetView, state: ActiveBlocks) -> Floats:
        prompt = float(request.prompt_tokens)
        costs = prompt + fleet.queued_prefill_tokens - self._credit_tokens(request, fleet)
        np.maximum(costs, 0.0, out=costs)
        costs *= self.prefill_scale
        if self.request_tokens:
            costs += self.request_tokens * fleet.requests
        costs += prompt
        costs /= request.block_size
        in_use, shared = state.blocks, state.shared(request.chain)
        if in_use:
            costs += [in_use.get(w, 0) - shared.get(w, 0) for w in fleet.worker_id.tolist()]
        return costs

    def _credit_tokens(self, request: RequestView, fleet: FleetView) -> Floats:
        credit: Floats = fleet.hit_tokens * np.float64(self.overlap_credit)
        if self.decay and len(fleet):
            queued: Floats = fleet.queued_prefill_tokens - float(fleet.queued_prefill_tokens.min())
            behind: Floats = queued / float(max(request.prompt_tokens, 1))
            credit /= 1.0 + self.decay * behind
        if self.host_credit:
            credit += self.host_credit * fleet.hit_tokens_host
        if self.disk_credit:
            credit += self.disk_credit * fleet.hit_tokens_disk
        return credit

    def initial_state(self) -> ActiveBlocks:
        return ActiveBlocks()

    def observe(self, fact: Any, state: ActiveBlocks) -> ActiveBlocks:
        state.observe(fact)
        return state
