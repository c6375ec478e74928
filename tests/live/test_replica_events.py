"""Tests with real programs of KV events that only one router can read: it reads them, and all
routers know them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import zmq
import zmq.asyncio

from engine.wire.events import BlockStored, encode_batch
from simulator.live.processes import Programs
from tests.live.metric_waits import until_metric
from tests.live.polled_engine import OPTIONS, polled_engine
from tests.live.ports import lasting_port
from tests.live.publishers import BLOCK, chain_hashes
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.replica_views import Routers, until_known, view
from tests.live.stack import WAIT_S, Stack, metric_sum, until

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@contextlib.asynccontextmanager
async def routers(folder: Path, url: str, *workers: str) -> AsyncIterator[Routers]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        yield Routers(url, list(workers), programs, http)


async def reader_of(*stacks: Stack) -> Stack:
    """Wait until exactly one router reads the engine's events and all others receive them from it;
    return the reader.
    """
    found: list[Stack] = []

    async def elected() -> bool:
        rows = [await stack.row(0) for stack in stacks]
        found[:] = [
            s for s, row in zip(stacks, rows, strict=True) if row["events_from"] == "read here"
        ]
        heard = [row for row in rows if str(row["events_from"]).startswith("received from ")]
        return len(found) == 1 and len(heard) == len(stacks) - 1

    await until(elected, "one reader, heard by all others")
    return found[0]


async def test_one_router_polls_events_for_all_and_another_takes_over_without_loss(
    tmp_path: Path, server: RedisServer
) -> None:
    async with (
        polled_engine() as cache,
        routers(tmp_path, server.url, f"{cache.url},{OPTIONS}") as fleet,
    ):
        one = await fleet.start("one")
        two = await fleet.start("two")
        assert await reader_of(one, two) is one
        cache.store(1, 50)
        cache.store(100, 8)
        cache.remove(103, 104)
        for stack in (one, two):
            await until_known(stack, cache.truth)
        one.router.process.kill()
        assert await reader_of(two) is two
        cache.store(200, 5)
        await until_known(two, cache.truth)
        assert (await view(two)).exact
        three = await fleet.start("three")
        await until_known(three, cache.truth)
        assert await reader_of(two, three) is two
        cache.remove(1)
        await until_known(three, cache.truth)
        two.router.process.terminate()
        assert await two.router.process.wait() == 0
        assert await reader_of(three) is three
        cache.store(300, 5)
        await until_known(three, cache.truth)
        assert await metric_sum(three.http, three.admin, "warmroute_kv_gaps_total") == 0


async def test_the_polling_router_continues_without_redis_and_shares_again_later(
    tmp_path: Path, server: RedisServer
) -> None:
    async with (
        polled_engine() as cache,
        routers(tmp_path, server.url, f"{cache.url},{OPTIONS}") as fleet,
    ):
        one, two = await fleet.start("one"), await fleet.start("two")
        assert await reader_of(one, two) is one
        cache.store(1, 5)
        for stack in (one, two):
            await until_known(stack, cache.truth)
        server.kill()
        for stack in (one, two):
            await until_metric(stack, "replicas_link_up", 0)
        cache.store(100, 5)
        await until_known(one, cache.truth)
        assert not (await view(two)).known, "what it knows is as of then"
        server.start()
        assert await reader_of(one, two) is one
        await until_known(two, cache.truth)
        assert (await view(two)).exact


async def test_one_router_binds_the_event_endpoint_and_the_next_takes_it_over(
    tmp_path: Path, server: RedisServer
) -> None:
    endpoint = f"tcp://127.0.0.1:{lasting_port()}"
    options = f"kind=openai,block_size={BLOCK},kv_tokens=1e6,events=bind:{endpoint}"
    async with (
        polled_engine() as engine,
        routers(tmp_path, server.url, f"{engine.url},{options}") as fleet,
    ):
        one, two = await fleet.start("one"), await fleet.start("two")
        assert await reader_of(one, two) is one
        context = zmq.asyncio.Context()
        pub = context.socket(zmq.XPUB)
        pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # a repeated subscription is reported, too
        pub.connect(endpoint)
        try:
            chains = await _publish(pub, 0)
            for stack in (one, two):
                await until_known(stack, sorted(chains))
            one.router.process.kill()
            assert await reader_of(two) is two
            chains += await _publish(pub, 1)
            await until_known(two, sorted(chains))
        finally:
            pub.close(linger=0)
            context.term()


async def _publish(pub: zmq.asyncio.Socket, number: int) -> list[int]:
    """Publish one batch to the current subscribers and return the chain hashes of its blocks."""
    async with asyncio.timeout(WAIT_S):
        while await pub.recv() != b"\x01":
            pass
    tokens = np.arange(number * 1_000, number * 1_000 + 4 * BLOCK, dtype=np.int32)
    names = tuple(range(number * 10 + 1, number * 10 + 5))
    stored = BlockStored(names, tokens=tuple(tokens.tolist()), block_size=BLOCK)
    await pub.send_multipart([b"", number.to_bytes(8, "big"), encode_batch(time.time(), [stored])])
    return [int(hash_) for hash_ in chain_hashes(tokens, BLOCK)]


async def test_a_new_router_soon_knows_the_large_caches_of_several_workers(
    tmp_path: Path, server: RedisServer
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        caches = [await stack.enter_async_context(polled_engine()) for _ in range(8)]
        workers = [f"{cache.url},{OPTIONS}" for cache in caches]
        fleet = await stack.enter_async_context(routers(tmp_path, server.url, *workers))
        one = await fleet.start("one")
        await reader_of(one)
        for cache in caches:
            for first in range(0, 2_000, 100):
                cache.store(first + 1, 100)
        for worker_id, cache in enumerate(caches):
            await until_known(one, cache.truth, worker_id)
        two = await fleet.start("two")
        begun_s = time.monotonic()
        for worker_id, cache in enumerate(caches):
            await until_known(two, cache.truth, worker_id)
        print(f"{time.monotonic() - begun_s:.2f} s after it was ready it knew all")
        assert await metric_sum(two.http, two.admin, "warmroute_replicas_kv_snapshots_total") >= 8
