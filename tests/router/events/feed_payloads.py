"""Payloads for tests of a feed, and the blocks that a router knows from them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.router.events.feed_wire import (
    Rig,
    chain_of,
    pack,
    until,
)


def payload(n: int, padding: int = 0) -> bytes:
    """Return batch n in the form of vLLM 0.20: it stores the block of the tokens [n, n] without a
    parent.
    """
    event = ["BlockStored", [n], None, [n, n], 2, None, "GPU", None, None, 0]
    return pack(event, *([["Unknown", b"x" * padding]] if padding else []))


def holds(one: Rig, blocks: Sequence[int]) -> bool:
    return all(one.hit(chain_of([n, n], 2)) == 1 for n in blocks)


async def until_known(one: Rig, blocks: int) -> None:
    await until(
        lambda: one.kv().known and holds(one, range(blocks)), lambda: f"{blocks} blocks, exactly"
    )
