"""A pair of routers under load, as real programs: one is killed, Redis comes and goes.

What the pair promises its operators (docs/pair.md), with the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from simulator.processes import Programs
from tests.effort import EFFORT
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.stack import MODEL, Stack, engine_arguments, until
from tests.live.walled_redis import WalledRedis, walled_redis

pytestmark = needs_redis

STREAMS = 200
WORKERS = 3
# Promised of a machine that keeps up; a busy one, on which tests run side by side, gets more.
SLACK = 1.0 if EFFORT > 1 else 4.0
PHANTOM_S = 5.0 * SLACK  # longest that requests of a dead replica weigh on workers
EQUAL_S = 2.0 * SLACK  # longest until all know the same again


@pytest.fixture
def server(tmp_path: Path):
    with redis_server(tmp_path / "redis") as server:
        yield server


@dataclass
class Pair:
    """Two routers of the same workers. Lifetime: test."""

    stacks: list[Stack]
    failed: list[str] = field(default_factory=list)
    answered: int = 0

    @contextlib.asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Requests one after the other through each router, until the block ends."""
        tasks = [asyncio.create_task(self._ask(n)) for n in range(4)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, number: int) -> None:
        stack, turn = self.stacks[number % len(self.stacks)], 0
        while True:
            turn += 1
            status, answer = await stack.complete([number] * 64 + [turn] * 16, max_tokens=20)
            self.answered += 1
            if status != 200:
                self.failed.append(f"{status}: {answer}")


@contextlib.asynccontextmanager
async def pair(folder: Path, url: str, speed: float) -> AsyncIterator[Pair]:
    """Both know each other."""
    async with (
        Programs(folder) as programs,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        workers = [
            await programs.start(f"worker-{n}", "engine", engine_arguments(speed=speed))
            for n in range(WORKERS)
        ]
        named = [part for worker in workers for part in ("--worker", worker.url)]
        stacks = []
        for name in ("one", "two"):
            ports = ["--port", "0", "--admin-port", "0", "--state", url]
            arguments = ["serve", *ports, "--replicas-name", name, *named]
            router = await programs.start(name, "router", arguments)
            stacks.append(Stack(programs, router, workers, http))
        for stack in stacks:
            for worker_id in range(WORKERS):
                await stack.until_state(worker_id, "ready")
        for stack in stacks:
            await until_metric(stack, "replicas_peer_in_step", lambda n: n == 1)
        yield Pair(stacks)


async def until_metric(stack: Stack, name: str, good: Callable[[float], bool]) -> float:
    """Seconds until a metric is as it should be."""
    began_s = time.monotonic()

    async def reached() -> bool:
        return good(await stack.metric(f"warmroute_{name}"))

    await until(reached, name)
    return time.monotonic() - began_s


async def requests_at_workers(stack: Stack) -> list[int]:
    return [row["inflight_requests"] for row in await stack.rows()]


async def until_equal(both: Pair) -> float:
    """Seconds until both say the same of each worker."""
    began_s = time.monotonic()

    async def equal() -> bool:
        one, two = [await requests_at_workers(stack) for stack in both.stacks]
        return one == two

    await until(equal, "both to know the same")
    return time.monotonic() - began_s


@pytest.mark.alone
async def test_one_is_killed_under_streams(tmp_path: Path, server: RedisServer) -> None:
    async with pair(tmp_path, server.url, speed=1) as both:
        one, two = both.stacks
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 4_000, "stream": True}
        replies = await asyncio.gather(
            *(
                two.http.post(f"{both.stacks[n % 2].url}/v1/completions", json=body)
                for n in range(STREAMS)
            )
        )
        assert [reply.status for reply in replies] == [200] * STREAMS
        await until_metric(two, "worker_requests", lambda n: n == STREAMS)
        assert max(await requests_at_workers(two)) <= STREAMS / WORKERS + 2, "as one router would"

        one.router.process.send_signal(signal.SIGKILL)
        died_s = time.monotonic()
        for turn in range(20):
            assert (await two.complete([turn] * 64))[0] == 200
        await until_metric(two, "worker_requests", lambda n: n == STREAMS / 2)
        phantom_s = time.monotonic() - died_s
        print(f"requests of the dead replica were gone after {phantom_s:.2f} s")
        assert phantom_s <= PHANTOM_S
        lines = await asyncio.gather(*(reply.content.readline() for reply in replies[1::2]))
        assert all(line.startswith(b"data: ") for line in lines), "its own streams go on"
        for reply in replies:
            reply.close()
        await two.assert_idle()


async def _killed(server: RedisServer) -> None:
    server.kill()
    await asyncio.sleep(1.0 * EFFORT)  # how long it is away
    server.start()


async def _stopped(server: RedisServer | WalledRedis) -> None:
    server.pause()
    await asyncio.sleep(2.5 if EFFORT == 1 else 30.0)  # how long it is away
    server.go_on()


@pytest.mark.alone
@pytest.mark.parametrize("fault", [_killed, _stopped])
async def test_redis_comes_and_goes_under_load(
    tmp_path: Path, server: RedisServer, fault: Callable
) -> None:
    await _nobody_fails(tmp_path, server, fault)


@pytest.mark.alone
async def test_redis_is_cut_off_under_load(tmp_path: Path) -> None:
    with walled_redis(tmp_path / "redis") as server:
        await _nobody_fails(tmp_path, server, _stopped)


async def _nobody_fails(folder: Path, server: RedisServer | WalledRedis, fault: Callable) -> None:
    async with pair(folder, server.url, speed=20) as both:
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 20_000, "stream": True}
        url = f"{both.stacks[0].url}/v1/completions"
        async with both.traffic():
            replies = [await both.stacks[0].http.post(url, json=body) for _ in range(10)]
            await fault(server)
            returned_s = time.monotonic()
            for stack in both.stacks:
                await until_metric(stack, "replicas_link_up", lambda n: n == 1)
                await until_metric(stack, "replicas_peer_in_step", lambda n: n == 1)
            in_step_s = time.monotonic() - returned_s
            for stack in both.stacks:
                assert await stack.metric("warmroute_replicas_connects_total") > 1, "it was away"
        await until_equal(both)
        print(f"{fault.__name__}: in step after {in_step_s:.2f} s, {both.answered} answered")
        assert in_step_s <= EQUAL_S
        for reply in replies:
            reply.close()
        for stack in both.stacks:
            await stack.assert_idle()
        assert both.answered > 50
        assert both.failed == []
