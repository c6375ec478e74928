"""Tests with simulated workers of dense and hybrid models: a request finds as many cached tokens as
the router expects.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine.wire.events import decode_snapshot
from tests.live.kv_views import explained
from tests.live.replica_views import view
from tests.live.stack import Stack, metric_sum, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 60
GROUPS = {
    "dense": None,
    "windows": "window:128*2",
    "states": "state*3",
    "both": "window:64+state*2",
}
KINDS = {"dense": [], "windows": ["window"], "states": ["state"], "both": ["window", "state"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(GROUPS))
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, Stack]]:
    """Yield a router with one worker whose cache is so small that blocks are evicted all
    the time.
    """
    folder = tmp_path_factory.mktemp(request.param)
    groups = GROUPS[request.param]
    flags = {"kv-tokens": 3200, "speed": 200} | ({"cache-groups": groups} if groups else {})
    async with running(folder, 1, **flags) as stack:
        yield request.param, stack


def prompt(draw: random.Random, before: list[list[int]], roots: list[list[int]]) -> list[int]:
    """Return a prompt that is new, begins with a shared root, or repeats, extends or shortens an
    old one.
    """
    tail = [draw.randrange(1000) for _ in range(draw.randrange(1, 200))]
    kind, one = draw.randrange(5), draw.choice(before or [tail])
    made = [tail, draw.choice(roots) + tail, one, one + tail, one[: draw.randrange(1, 400)]]
    return made[kind][:900]


async def test_sequential_requests_hit_exactly_the_expected_tokens(
    served: tuple[str, Stack],
) -> None:
    name, stack = served
    draw, before = random.Random(3), list[list[int]]()
    roots = [[draw.randrange(1000) for _ in range(300)] for _ in range(3)]
    seen = []
    for _ in range(REQUESTS):
        before.append(prompt(draw, before, roots))
        seen.append(await explained(stack, before[-1]))
        await until_events_received(stack)
    assert [one["expected"] for one in seen] == [one["cached"] for one in seen]
    assert sum(one["cached"] > 0 for one in seen) > REQUESTS / 4
    row: dict[str, Any] = await stack.row(0)
    assert [group["kind"] for group in row["cache_groups"] or ()] == KINDS[name]
    assert not any(row["events_skipped"].values())
    assert await metric_sum(stack.http, stack.workers[0].url, "vllm:prefix_cache_hits_total")


async def until_events_received(stack: Stack) -> None:
    """Wait until the router has received all events of its worker so far."""

    async def events_received() -> bool:
        async with stack.http.get(f"{stack.workers[0].url}/kv_snapshot") as reply:
            sent = decode_snapshot(await reply.read()).seq
        return (await view(stack)).next_seq == sent + 1

    await until(events_received, "all events to be heard")
