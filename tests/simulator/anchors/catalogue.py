"""All anchors, in the order of the page."""

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
