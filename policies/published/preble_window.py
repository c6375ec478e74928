"""The memory of the policy Preble: the work of each worker, and the times of each large prefix, in
the last minutes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any

from policies.contract import Hashes
from policies.facts import (
    Arrival,
    Dispatched,
    Failure,
    Finish,
    FirstToken,
    Prefilled,
    Role,
    legs_over,
)
from policies.published.recent import hit_blocks
from policies.published.window_sums import WindowSums

MAX_NODES = 64  # prefixes after which prompts differ, the latest used
MAX_OUTPUTS = 256  # latest answers, for the median
MAX_UNDER_WAY = 16_384  # requests before their first token; beyond it the oldest is dropped

_ANSWERING: tuple[Role, ...] = ("both", "decode")  # legs that have a first token


class PrebleWindow:
    """Sums the prefill work of each worker and the first-token times of each large prefix.

    The sums cover the last minutes. Facts must come in the order of time. A node is a prefix after
    which prompts differ: the cached part of some dispatch's prompt. A node is large if it is more
    than twice as long as the next shorter node of the same prompt. Lifetime: the policy's.
    """

    def __init__(self, window_s: float) -> None:
        self.dispatches = 0
        self.work = WindowSums(window_s)  # worker -> new tokens, their query-key pairs
        self.ttft = WindowSums(window_s)  # node -> seconds, requests
        self._nodes: dict[int, int] = {}  # chain hash -> blocks; the latest used stands last
        self._depths: list[int] = []  # blocks of each node, in order
        # (request, leg) -> since, its nodes
        self._under_way: dict[tuple[int, Role], tuple[float, list[int]]] = {}
        self._outputs: deque[int] = deque()
        self._in_order: list[int] = []  # the same by size

    @property
    def median_output_tokens(self) -> float:
        """Median number of tokens in recent answers; 0 before the first answer."""
        count = len(self._in_order)
        return (self._in_order[count // 2] + self._in_order[(count - 1) // 2]) / 2 if count else 0.0

    def large_nodes(self, chain: Hashes) -> list[int]:
        """Return the large nodes of a prompt by chain hash, shortest first, in O(nodes).

        A node is a prefix after which prompts differ. It is large if it is more than twice as long
        as the next shorter node.
        """
        depths = self._depths[: bisect_left(self._depths, len(chain) + 1)]
        ends = chain[[depth - 1 for depth in depths]].tolist() if depths else []
        above, large = 0, []
        for depth, end in zip(depths, ends, strict=True):
            if depth != above and self._nodes.get(end) == depth:
                if depth > 2 * above:
                    large.append(end)
                above = depth
        return large

    def observe(self, fact: Any) -> None:
        """Update the sums by a fact; other kinds of facts change nothing."""
        kind = type(fact)
        if kind is Arrival:
            self.work.advance(fact.now_s)
            self.ttft.advance(fact.now_s)
        elif kind is Dispatched:
            self._dispatched(fact)
        elif kind is FirstToken:
            for leg in _ANSWERING:
                since_s, nodes = self._under_way.pop((fact.request_id, leg), (0.0, []))
                for node in nodes:
                    self.ttft.add(fact.now_s, node, fact.now_s - since_s, 1.0)
        elif kind is Finish or kind is Failure or kind is Prefilled:
            for leg in legs_over(fact):
                self._under_way.pop((fact.request_id, leg), None)
            if kind is Finish and fact.output_tokens is not None:
                self._outputs.append(fact.output_tokens)
                insort(self._in_order, fact.output_tokens)
                if len(self._outputs) > MAX_OUTPUTS:
                    del self._in_order[bisect_left(self._in_order, self._outputs.popleft())]

    def _dispatched(self, fact: Dispatched) -> None:
        self.dispatches += 1
        new, held = fact.uncached_tokens, fact.hit_tokens
        self.work.add(fact.now_s, fact.worker_id, new, new * (held + new / 2))
        blocks = hit_blocks(fact)
        if blocks:
            self._touch(int(fact.chain[blocks - 1]), blocks)
        if len(self._under_way) >= MAX_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[fact.request_id, fact.leg] = (fact.now_s, self.large_nodes(fact.chain))

    def _touch(self, node: int, blocks: int) -> None:
        if self._nodes.pop(node, None) is None:
            if len(self._nodes) >= MAX_NODES:
                oldest = next(iter(self._nodes))
                self._depths.remove(self._nodes.pop(oldest))
            insort(self._depths, blocks)
        self._nodes[node] = blocks
