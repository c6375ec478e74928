"""Tests of a pair of routers under load, as real programs: one is killed, Redis comes and goes.

They check what docs/replicas.md promises to operators, with its figures.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.effort import EFFORT
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.router_pair import WORKERS, pair, requests_at_workers, until_equal, until_metric
from tests.live.stack import MODEL
from tests.live.walled_redis import WalledRedis, walled_redis
from tests.pauses import running_s

pytestmark = needs_redis

STREAMS = 200
AT_ONCE = 20
# The page promises this for a machine that keeps up; one that runs tests in parallel gets more.
SLACK = 1.0 if EFFORT > 1 else 4.0
PHANTOM_S = 5.0 * SLACK  # longest that requests of a dead replica weigh on workers
EQUAL_S = 2.0 * SLACK  # longest until all know the same again


@pytest.fixture
def server(tmp_path: Path):
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.mark.alone
async def test_a_killed_router_is_forgotten_by_its_peer_under_streams(
    tmp_path: Path, server: RedisServer
) -> None:
    # The policy uses only requests, of which each router hears from the other. A policy that weighs
    # queued prefill as well is as uneven as the prefill at that moment.
    async with pair(tmp_path, server.url, speed=1, policy="least_requests") as both:
        one, two = both.stacks
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 4_000, "stream": True}
        replies = []
        # The routers get batches in turn. Two that place batches at the same moment send both
        # to the worker that had the fewest requests, and turn its deficit into an equal excess.
        for begun in range(0, STREAMS, AT_ONCE):
            url = f"{both.stacks[begun // AT_ONCE % 2].url}/v1/completions"
            asks = (two.http.post(url, json=body) for _ in range(AT_ONCE))
            replies += await asyncio.gather(*asks)
            await until_equal(both)
        assert [reply.status for reply in replies] == [200] * STREAMS
        await until_metric(two, "worker_requests", lambda n: n == STREAMS)
        assert max(await requests_at_workers(two)) <= STREAMS / WORKERS + 2, "as one router would"

        one.router.process.send_signal(signal.SIGKILL)

        async def forgotten() -> None:
            for turn in range(20):
                assert (await two.complete([turn] * 64))[0] == 200
            await until_metric(two, "worker_requests", lambda n: n == STREAMS / 2)

        phantom_s = await running_s(forgotten())
        print(f"requests of the dead replica were gone after {phantom_s:.2f} s")
        assert phantom_s <= PHANTOM_S
        own = [reply for n, reply in enumerate(replies) if n // AT_ONCE % 2]
        lines = await asyncio.gather(*(reply.content.readline() for reply in own))
        assert all(line.startswith(b"data: ") for line in lines), "its own streams go on"
        for reply in replies:
            reply.close()
        await two.assert_idle()


async def _killed(server: RedisServer) -> None:
    server.kill()
    await asyncio.sleep(1.0 * EFFORT)  # the time for which it is away
    server.start()


async def _stopped(server: RedisServer | WalledRedis) -> None:
    server.pause()
    await asyncio.sleep(2.5 if EFFORT == 1 else 30.0)  # the time for which it is away
    server.go_on()


@pytest.mark.alone
# A stopped Redis does not answer, like one that is cut off.
@pytest.mark.parametrize("fault", [_killed, pytest.param(_stopped, marks=pytest.mark.full)])
async def test_no_request_fails_while_redis_fails_and_returns(
    tmp_path: Path, server: RedisServer, fault: Callable
) -> None:
    await _assert_no_request_fails(tmp_path, server, fault)


@pytest.mark.alone
async def test_no_request_fails_while_redis_is_cut_off(tmp_path: Path) -> None:
    with walled_redis(tmp_path / "redis") as server:
        await _assert_no_request_fails(tmp_path, server, _stopped)


async def _assert_no_request_fails(
    folder: Path, server: RedisServer | WalledRedis, fault: Callable
) -> None:
    async with pair(folder, server.url, speed=20) as both:
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 20_000, "stream": True}
        url = f"{both.stacks[0].url}/v1/completions"
        async with both.traffic():
            replies = [await both.stacks[0].http.post(url, json=body) for _ in range(10)]
            await fault(server)

            async def in_step() -> None:
                for stack in both.stacks:
                    await until_metric(stack, "replicas_link_up", lambda n: n == 1)
                    await until_metric(stack, "replicas_peer_in_sync", lambda n: n == 1)

            in_step_s = await running_s(in_step())
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
