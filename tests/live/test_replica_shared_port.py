"""Tests of two routers on one host that share one client port and know each other through Redis."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Programs
from tests.live.ports import lasting_port
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, until

pytestmark = needs_redis
REQUESTS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


async def until_sum(stack: Stack, name: str, value: float) -> None:
    async def reached() -> bool:
        return await metric_sum(stack.http, stack.admin, f"warmroute_{name}") == value

    await until(reached, f"{name} to be {value:g}")


async def ask(url: str, prompt: list[int]) -> int:
    """Send a request on a new connection, which the kernel gives to either router; return the
    answer's status.
    """
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(f"{url}/v1/completions", json=body) as reply,
    ):
        await reply.read()
        return reply.status


async def test_two_routers_share_a_port_and_their_state(
    tmp_path: Path, server: RedisServer
) -> None:
    port = str(lasting_port())
    async with Programs(tmp_path) as programs, aiohttp.ClientSession() as http:
        workers = [
            await programs.start(f"worker-{n}", "engine", engine_arguments(speed=4))
            for n in range(2)
        ]
        ports = ["--port", port, "--admin-port", "0", "--reuse-port", "true", "--explain", "true"]
        names = [part for worker in workers for part in ("--worker", worker.url)]
        routers = []
        for name in ("one", "two"):
            arguments = ["serve", *ports, *names, "--state", server.url, "--replicas-name", name]
            routers.append(await programs.start(name, "router", arguments))
        stacks = [Stack(programs, router, workers, http) for router in routers]
        one, two = stacks
        assert one.url == two.url
        for stack in stacks:
            for worker_id in range(2):
                await stack.until_state(worker_id, "ready")
            await until_sum(stack, "replicas_peer_in_sync", 1)
        asked = [ask(one.url, [n] * 64) for n in range(REQUESTS)]
        assert await asyncio.gather(*asked) == [200] * REQUESTS
        decisions = [await metric_sum(http, s.admin, "warmroute_decisions_total") for s in stacks]
        assert sum(decisions) == REQUESTS
        assert min(decisions) > 0, "all of them at one of two by chance is impossible"
        for stack in stacks:
            await until_sum(stack, "worker_requests", 0)
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 2_000, "stream": True}
        stream = await http.post(f"{one.url}/v1/completions", json=body)
        for stack in stacks:  # either may have it, and both count it
            await until_sum(stack, "worker_requests", 1)
        stream.close()
        two.router.process.send_signal(signal.SIGKILL)
        await two.router.process.wait()
        await until_sum(one, "replicas_peers", 0)
        assert await asyncio.gather(*(ask(one.url, [n] * 8) for n in range(6))) == [200] * 6
        await until_sum(one, "worker_requests", 0)


async def test_only_routers_with_reuse_port_share_a_port(tmp_path: Path) -> None:
    port = str(lasting_port())
    ports = ["serve", "--port", port, "--admin-port", "0"]
    async with Programs(tmp_path) as programs:
        await programs.start("one", "router", [*ports, "--reuse-port", "true"])
        with pytest.raises(RuntimeError, match="address already in use"):
            await programs.start("two", "router", ports)
