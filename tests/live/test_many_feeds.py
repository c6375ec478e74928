"""Tests of two hundred event streams at once: each loss shows as a gap, which a replay fills."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import numpy as np

from router.admin.kv_view import KvView, decode_kv_view
from simulator.live.processes import Programs
from tests.live.publishers import BLOCK, Publisher, all_chains, publishing
from tests.live.stack import Stack, until

PUBLISHERS, BATCHES = 200, 30
LOSS = 0.03
QUIET = ["--intervals-health-s", "5", "--intervals-load-report-s", "5"]


def prepare(publishers: list[Publisher], rng: np.random.Generator) -> None:
    """Give each publisher batches of a prefix that all share, and of prompts of its own."""
    trunk = rng.integers(0, 30_000, 4 * BLOCK, dtype=np.int32)
    for one in publishers:
        one.add(trunk)
        for _ in range(BATCHES):
            blocks = int(rng.integers(1, 5))
            one.add(rng.integers(0, 30_000, blocks * BLOCK, dtype=np.int32))


async def burst(one: Publisher, rng: random.Random) -> None:
    """Publish all of the publisher's batches except the last, and leave some of them out
    at random.
    """
    for number in range(len(one.batches) - 1):
        if rng.random() < LOSS:
            one.lost += 1
        else:
            await one.send(number)


async def test_no_event_of_many_publishers_is_lost_unnoticed(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with (
        Programs(tmp_path) as programs,
        aiohttp.ClientSession() as http,
        publishing(PUBLISHERS) as pool,
    ):
        arguments = ["serve", "--port", "0", "--admin-port", "0", *QUIET]
        for spec in pool.specs:
            arguments += ["--worker", spec]
        stack = Stack(programs, await programs.start("router", "router", arguments), [], http)

        async def view(number: int) -> KvView:
            async with http.get(f"{stack.admin}/kv?worker={number}") as reply:
                assert reply.status == 200, await reply.text()
                return decode_kv_view(await reply.read())

        async def joined() -> bool:
            return {row["state"] for row in await stack.rows()} == {"ready"}

        async def listening() -> bool:
            return await stack.metric("warmroute_worker_kv_known") == PUBLISHERS

        async def replayed_twice() -> bool:
            return all(one.asked >= 2 for one in pool.all)

        await until(joined, "all workers to join")
        await asyncio.gather(*(one.subscribed() for one in pool.all))
        await until(listening, "all to be known to have published nothing")
        # Feeds ask a second time when their subscription has taken hold. A question between a loss
        # and the next batch would bring back what must show as a gap.
        await until(replayed_twice, "every feed to have asked for what it missed")
        prepare(pool.all, np.random.default_rng(5))
        await asyncio.gather(*(burst(one, rng) for one in pool.all))
        for one in pool.all:
            await one.send(len(one.batches) - 1)

        async def all_received() -> bool:
            blocks = sum(len(all_chains(one)) for one in pool.all)
            known = await stack.metric("warmroute_worker_kv_known")
            return known == PUBLISHERS and blocks == await stack.metric(
                "warmroute_worker_resident_blocks"
            )

        await until(all_received, "every batch")
        assert sum(one.lost for one in pool.all) > PUBLISHERS / 2
        for number, one in enumerate(pool.all):
            seen = await view(number)
            assert seen.next_seq == len(one.batches)
            assert np.array_equal(seen.chains(), all_chains(one))
            assert (seen.counters["gaps"] > 0) == (one.lost > 0), (number, one.lost, seen)
