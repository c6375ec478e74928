"""Tests that alerts fire in a real Prometheus while real programs have the fault.

Rules and scrape configuration are those that we ship, sixty times as fast.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.frozen import freeze
from tests.grafana.monitoring import Prometheus, accelerated, prometheus
from tests.live.redis_server import RedisServer, needs_redis
from tests.live.stack import MODEL, Stack, engine_arguments, running, until

# One stack for all: each test leaves it as it found it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACES = 24  # requests that the router takes at once
FLAGS = {
    "--policy": "kv_prefix",  # all requests with the same head go to one worker
    "--limits-inflight-requests": str(PLACES),
    "--intervals-health-s": "3",
    "--timeouts-probe-s": "1",
    "--ejection-recover-s": "0.5",
}


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """Yield a running Redis, or None if it is not installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory, redis):
    flags = [part for flag in FLAGS.items() for part in flag]
    if redis is not None:
        flags += ["--state", redis.url]
    async with running(tmp_path_factory.mktemp("logs"), 3, flags, speed=1) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(stack, tmp_path_factory):
    targets = {"warmroute": [stack.admin], "engine": [worker.url for worker in stack.workers]}
    async with prometheus(stack.http, tmp_path_factory.mktemp("prometheus"), targets) as server:
        yield server


@asynccontextmanager
async def load(stack: Stack, requests: int, stream: bool = False) -> AsyncIterator[None]:
    """Keep `requests` requests with the same head in flight during the block."""
    body = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 400, "stream": stream}

    async def one() -> None:
        while True:
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                await reply.read()
                if reply.status != 200:
                    await asyncio.sleep(0.2)  # a client waits before it tries again

    tasks = [asyncio.create_task(one()) for _ in range(requests)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def until_firing(server: Prometheus, name: str, **labels: str) -> None:
    async def seen() -> bool:
        alerts = (await server.firing()).get(name, [])
        return any(labels.items() <= alert.items() for alert in alerts)

    await until(seen, f"{name} {labels} to fire")


async def no_alert_fires(server: Prometheus) -> bool:
    return await server.firing() == {}


async def until_ended(server: Prometheus, name: str) -> None:
    async def gone() -> bool:
        return name not in await server.firing()

    await until(gone, f"{name} to end")


async def test_accelerated_rules_differ_only_in_their_durations() -> None:
    text = "expr: x:rate5m > 14.4 * rate(a[5m] offset 10m)\nfor: 30s\nfor: 6h\n"
    assert (
        accelerated(text) == "expr: x:rate5m > 14.4 * rate(a[5s] offset 10s)\nfor: 1s\nfor: 360s\n"
    )


async def test_no_alert_fires_for_a_healthy_stack(stack, server) -> None:
    async with load(stack, 3):
        await server.until_data(["instance:warmroute_bad_answers:rate5m >= 0"])
        # An overloaded machine may miss scrapes; that alert is right, and ends.
        await until(lambda: no_alert_fires(server), "all alerts to be silent")


async def test_the_hot_spot_alert_fires_and_ends(stack, server) -> None:
    async with load(stack, 16):
        await until_firing(server, "WarmrouteHotSpot", severity="warning", instance=server.target)
    await until_ended(server, "WarmrouteHotSpot")


async def test_the_saturation_alert_fires_and_ends(stack, server) -> None:
    async with load(stack, PLACES + 4):
        await until_firing(
            server, "WarmrouteSaturated", severity="critical", instance=server.target
        )
    await until_ended(server, "WarmrouteSaturated")


async def test_a_hanging_worker_fires_the_alert_that_it_is_down(stack, server) -> None:
    async with load(stack, 3, stream=True):

        async def taken() -> bool:
            return any(row["context_tokens"] for row in await stack.rows())

        await until(taken, "a worker to have streams")
        hot = next(row for row in await stack.rows() if row["context_tokens"])
        hung = next(worker for worker in stack.workers if worker.url == hot["url"])
        freeze(hung.process.pid)
        try:
            await until_firing(server, "WarmrouteWorkerDown", worker=str(hot["id"]))
        finally:
            hung.process.send_signal(signal.SIGCONT)
        await stack.until_state(hot["id"], "ready")
        await until_ended(server, "WarmrouteWorkerDown")


async def test_alerts_fire_for_a_dead_worker_and_end_after_its_restart(stack, server) -> None:
    dead = stack.workers[2]
    row = next(row for row in await stack.rows() if row["url"] == dead.url)
    dead.process.kill()
    await dead.process.wait()
    await until_firing(server, "WarmrouteEngineDown", instance=dead.url.removeprefix("http://"))
    await until_firing(server, "WarmrouteWorkerDown", worker=str(row["id"]))
    again = engine_arguments(port=urlsplit(dead.url).port, speed=1)
    await stack.programs.start("worker-2-again", "engine", again)
    await stack.until_state(row["id"], "ready")
    for name in ("WarmrouteEngineDown", "WarmrouteWorkerDown"):
        await until_ended(server, name)


@needs_redis
async def test_the_stale_replica_alert_fires_without_redis_and_ends_with_it(
    stack, server, redis
) -> None:
    redis.kill()
    await until_firing(server, "WarmrouteReplicaStale", instance=server.target)
    redis.start()
    await until_ended(server, "WarmrouteReplicaStale")
