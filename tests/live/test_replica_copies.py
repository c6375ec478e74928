"""Tests of routers whose engines offer no replay: a new router gets its peer's copy of the caches'
content.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from router.cli.kv import truth_of
from simulator.live.processes import Program, Programs
from tests.frozen import freeze
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.replica_views import Routers, until_known, view
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, until

pytestmark = needs_redis
BLOCK = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


class Engine:
    """A worker that offers only live KV events, without snapshot and replay. Lifetime: test."""

    def __init__(self, program: Program, http: aiohttp.ClientSession, source: str) -> None:
        self.program, self.http = program, http
        self.spec = f"{program.url},events={source},kind=vllm"
        self.served = 0

    async def serve(self, prompts: int, blocks: int = 20) -> None:
        """Send `prompts` prompts to the engine, each with blocks that no other has."""
        for _ in range(prompts):
            self.served += 1
            prompt = [self.served] * (blocks * BLOCK + 1)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            async with self.http.post(f"{self.program.url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()

    async def clear(self) -> None:
        """Clear the engine's cache, which it publishes as an event; a router that receives the
        event knows the cache exactly.
        """
        async with self.http.post(f"{self.program.url}/reset_prefix_cache") as reply:
            assert reply.status == 200, await reply.text()

    async def truth(self) -> list[int]:
        """Return the chain hashes of the blocks that the engine itself reports."""
        async with self.http.get(f"{self.program.url}/kv_snapshot") as reply:
            _, chains = truth_of(await reply.read())
        return sorted(int(chain) for chain in chains)


@contextlib.asynccontextmanager
async def engine_and_routers(folder: Path, url: str) -> AsyncIterator[tuple[Engine, Routers]]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        arguments = engine_arguments(**{"kv-tokens": 1 << 20, "block-size": BLOCK})
        program = await programs.start("engine", "engine", arguments)
        async with http.get(f"{program.url}/kv_event_sources") as reply:
            source = (await reply.json())["0"]["endpoint"]
        engine = Engine(program, http, source)
        yield engine, Routers(url, [engine.spec], programs, http)


async def borrowed(stack: Stack) -> float:
    return await metric_sum(
        stack.http, stack.admin, 'warmroute_replicas_kv_snapshots_total{direction="borrowed"}'
    )


async def known_with(stack: Stack, engine: Engine) -> None:
    await until_known(stack, await engine.truth())


async def until_received_by(stack: Stack, engine: Engine) -> None:
    """Send prompts until the router receives an event of one: its subscription takes effect after
    it is ready, and earlier events are lost.
    """
    before = len((await view(stack)).chains())

    async def event_received() -> bool:
        await engine.serve(1)
        return len((await view(stack)).chains()) > before

    await until(event_received, "the engine's events to be heard")


async def first_of(routers: Routers, engine: Engine, prompts: int) -> Stack:
    """Start a router, send the engine `prompts` prompts, and wait until the router knows its whole
    cache.
    """
    one = await routers.start("one")
    await until_received_by(one, engine)
    await engine.clear()
    await engine.serve(prompts)
    await known_with(one, engine)
    return one


async def test_a_new_router_knows_the_events_published_before_its_start(
    tmp_path: Path, server: RedisServer
) -> None:
    async with engine_and_routers(tmp_path, server.url) as (engine, routers):
        one = await first_of(routers, engine, prompts=30)
        two = await routers.start("two")
        await known_with(two, engine)
        assert (await view(two)).exact
        assert (await borrowed(one), await borrowed(two)) == (0, 1)
        await until_received_by(two, engine)
        await engine.serve(5)
        for stack in (one, two):
            await known_with(stack, engine)
        one.router.process.kill()
        three = await routers.start("three")
        await known_with(three, engine)
        assert await borrowed(two) == 1


async def test_a_new_router_under_load_misses_no_event(tmp_path: Path, server: RedisServer) -> None:
    async with engine_and_routers(tmp_path, server.url) as (engine, routers):
        await first_of(routers, engine, prompts=30)
        load = asyncio.create_task(engine.serve(200, blocks=5))
        two = await routers.start("two")
        await load
        await known_with(two, engine)
        assert (await view(two)).exact


async def test_a_new_router_does_not_wait_for_a_frozen_peer(
    tmp_path: Path, server: RedisServer
) -> None:
    """A new router does not wait for a frozen peer: it uses the events that it received itself, and
    adds the peer's copy when that arrives.
    """
    async with engine_and_routers(tmp_path, server.url) as (engine, routers):
        one = await first_of(routers, engine, prompts=10)
        freeze(one.router.process.pid)
        two = await routers.start("two")
        await until_received_by(two, engine)
        before = set(await engine.truth())
        await engine.serve(3)
        news = set(await engine.truth()) - before
        assert len(news) == 3 * 20

        async def event_received() -> bool:
            seen = await view(two)
            return not seen.known and news <= set(seen.chains().tolist())

        await until(event_received, "the newcomer to go on alone")
        one.router.process.send_signal(signal.SIGCONT)
        three = await routers.start("three")
        await known_with(three, engine)
        assert (await view(three)).exact
