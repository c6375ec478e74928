"""DualMap: hashes the head of the prompt to two workers, and takes the warmer one if it
is in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, Hashes, RequestView
from policies.facts import Arrival
from policies.published.hashing import weights
from policies.published.recent import HeadWindow

DOUBLED_LEVELS = 8  # 4, 8, ... 512 blocks, as in Dynamo's port
EVEN_LEVELS = 256  # 4, 8, 12, ... 1,024 blocks


@dataclass(frozen=True, slots=True)
class DualMap:
    """Makes two workers candidates, by the highest hash weights of the prompt's head; others cost
    +inf.

    The candidate with more hit tokens costs -1 while its predicted TTFT = queued prefill seconds +
    missing tokens / rate is at most `ttft_slo_s`. Otherwise, and if both hold equally much, a
    candidate costs its queued prefill seconds. Without a head (a short prompt) all workers are
    candidates.

    The head is the first `head_blocks` blocks. If the prompt is hot (its share of the last
    `window_requests` arrivals is above 2 / workers), the head has twice as many blocks, and so on,
    as published; with `continuous`, it grows by `head_blocks` at a time. Source: DualMap (ICLR
    2026, arXiv 2602.06502) with its SLO of 5 s; depths, window and rendezvous hashing as in NVIDIA
    Dynamo's port, 2026. Queued requests do not migrate between the two candidates here, as they do
    in the paper.

    Spill depth: to the other candidate once queued + own prefill exceed the SLO. Requests never
    leave the two candidates until a deeper head separates them: a shared prompt that ends between
    two doublings keeps every shorter request on the same two. Unknown hits count as the known ones;
    no signal that the policy reads can be absent.
    """

    head_blocks: int = 4
    ttft_slo_s: float = 5.0
    window_requests: int = 1_000
    continuous: bool = False

    def __post_init__(self) -> None:
        for name in ("head_blocks", "window_requests"):
            if not 1 <= getattr(self, name) <= 100_000:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 to 100000")
        if not 0.0 < self.ttft_slo_s < float("inf"):
            raise ValueError(f"ttft_slo_s is {self.ttft_slo_s}; it must be finite, above 0")

    def initial_state(self) -> HeadWindow:
        return HeadWindow(self.window_requests)

    def observe(self, fact: Any, state: HeadWindow) -> HeadWindow:
        if isinstance(fact, Arrival):
            state.add([head for chain in fact.chains.values() for head in self._heads(chain)])
        return state

    def _heads(self, chain: Hashes) -> list[int]:
        step = self.head_blocks
        if self.continuous:
            heads: list[int] = chain[step - 1 : step * EVEN_LEVELS : step].tolist()
            return heads
        depths = [step << level for level in range(DOUBLED_LEVELS)]
        return [int(chain[depth - 1]) for depth in depths if depth <= len(chain)]

    def costs(self, request: RequestView, fleet: FleetView, state: HeadWindow) -> Floats:
        queued_s = fleet.queued_prefill_s
        heads = self._heads(request.chain)
        if len(fleet) < 2 or not heads:
            return queued_s
        head = state.coolest(heads, 2 / len(fleet))
        first_weights, second_weights = (weights(head, fleet.worker_id, s) for s in (1, 2))
        first = int(first_weights.argmax())
        second_weights[first] = 0
        second = int(second_weights.argmax())
        costs = np.full(len(fleet), np.inf)
        costs[[first, second]] = queued_s[[first, second]]
        hits = fleet.hit_tokens
        if hits[first] != hits[second]:
            warm = first if hits[first] > hits[second] else second
            missing = max(request.prompt_tokens - int(hits[warm]), 1)
            if queued_s[warm] + missing / fleet.prefill_tokens_per_s[warm] <= self.ttft_slo_s:
                costs[warm] = -1.0
        return costs
