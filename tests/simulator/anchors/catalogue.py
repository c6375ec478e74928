"""The list of all anchors, in the order in which docs/notes/anchors.md shows them."""

from __future__ import annotations

from tests.simulator.anchors import agents, bursts, gateways, kimi, ladders, memory, pools
from tests.simulator.anchors.record import Anchor

ANCHORS: tuple[Anchor, ...] = (
    *ladders.ANCHORS,
    *memory.ANCHORS,
    *agents.ANCHORS,
    *bursts.ANCHORS,
    *kimi.ANCHORS,
    *gateways.ANCHORS,
    *pools.ANCHORS,
)
