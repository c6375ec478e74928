"""Tests that replicas share state although their clocks differ by seconds and Redis is far away."""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.live.lease_holder import LeaseHolder
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.router_pair import (
    WORKERS,
    Pair,
    pair,
    requests_at_workers,
    until_equal,
    until_metric,
)
from tests.live.shifted_clock import ShiftedClock
from tests.live.slow_line import slow_line
from tests.live.stack import MODEL, Stack
from tests.pauses import measured
from tests.router.replicas.replica_support import fleet, until

pytestmark = needs_redis

SHIFTS_S = 5, -5
ONE_WAY_S = 0.02
STREAMS = 40
LATE_S = 1.0  # for a busy machine; news that waited for a beat would be later


@pytest.fixture
def server(tmp_path: Path):
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path)


@pytest.mark.parametrize("shift_s", SHIFTS_S)
def test_a_shifted_clock_is_off_but_its_monotonic_clock_is_right(clock, shift_s) -> None:
    asked = "import time; print(time.time(), time.monotonic())"
    with clock.off_by(shift_s):
        command = [sys.executable, "-c", asked]
        began_s = time.time()
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wall_s, counted_s = map(float, told.split())
    assert began_s - 2.5 < wall_s - shift_s < time.time() + 2.5
    assert 0.0 <= time.monotonic() - counted_s < 60.0


async def seconds_off(stack: Stack) -> float:
    """Return by how many seconds a router's date is wrong."""
    async with stack.http.get(f"{stack.admin}/ui/state") as reply:
        shown: float = (await reply.json())["frame"]["unix_s"]
    return shown - time.time()


async def counted(both: Pair, name: str) -> list[float]:
    return [await stack.metric(f"warmroute_replicas_{name}") for stack in both.stacks]


async def test_a_pair_with_clocks_10_s_apart_and_redis_40_ms_away_works_as_one_router(
    tmp_path: Path, server: RedisServer, clock: ShiftedClock
) -> None:
    """With clocks ten seconds apart and Redis 40 ms away, two routers spread streams as one would,
    fail no request, and forget a peer that died.
    """
    around = [partial(clock.off_by, shift_s) for shift_s in SHIFTS_S]
    async with (
        slow_line(server.port, ONE_WAY_S) as port,
        pair(tmp_path, f"redis://127.0.0.1:{port}", 0.5, around) as both,
    ):
        one, two = both.stacks

        async def apart_s() -> float:
            return await seconds_off(one) - await seconds_off(two)

        off_s = await measured(apart_s, lambda s: abs(s - (SHIFTS_S[0] - SHIFTS_S[1])) < 3.0)
        assert abs(off_s - (SHIFTS_S[0] - SHIFTS_S[1])) < 3.0
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 4_000, "stream": True}
        replies = []
        for number in range(STREAMS):
            url = both.stacks[number % 2].url
            replies.append(await one.http.post(f"{url}/v1/completions", json=body))
        assert [reply.status for reply in replies] == [200] * STREAMS
        await until_metric(two, "worker_requests", lambda n: n == STREAMS)
        await until_equal(both)
        # Requests younger than the news may go to the same worker twice: a few of them.
        assert max(await requests_at_workers(two)) <= STREAMS / WORKERS + 6
        async with both.traffic():
            beats = await counted(both, "messages_total")
            for stack, before in zip(both.stacks, beats, strict=True):
                # Two leases and more: a router that compared clocks would believe the other one
                # gone.
                enough = partial(float.__lt__, before + 30.0)
                await until_metric(stack, "replicas_messages_total", enough)
        assert both.failed == []
        assert both.answered > 0
        assert await counted(both, "peers") == [1, 1]
        assert await counted(both, "lapses_total") == [0, 0]
        assert await counted(both, "connects_total") == [1, 1]
        one.router.process.send_signal(signal.SIGKILL)
        await until_metric(two, "replicas_peers", lambda n: n == 0)
        await until_metric(two, "worker_requests", lambda n: n == STREAMS / 2)
        for reply in replies:
            reply.close()
        await two.assert_idle()


async def test_a_lease_has_one_holder_despite_shifted_clocks(
    server: RedisServer, clock: ShiftedClock
) -> None:
    async with slow_line(server.port, ONE_WAY_S) as port:
        url = f"redis://127.0.0.1:{port}"
        holders = [await LeaseHolder.start(url, 1.5, clock.environment(s)) for s in SHIFTS_S]
        try:
            first, other = holders
            tokens: list[int] = []
            # The lease continues over several times its length, then passes to the other one by a
            # death.
            for _ in range(30):
                before, others, after = [await holder.fence() for holder in (first, other, first)]
                assert before is None or before != after or others is None, "two have it"
                tokens += [token for token in (before, others) if token is not None]
                await asyncio.sleep(0.1)  # sets the length of both histories
            assert tokens
            assert tokens == sorted(tokens), "whoever has it later has the greater token"
            if await first.fence() is None:
                first, other = other, first
            first.process.kill()
            while (token := await other.fence()) is None:  # noqa: ASYNC110 - it is a program
                await asyncio.sleep(0.05)
            assert token > tokens[-1]
        finally:
            for holder in holders:
                await holder.end()


async def test_messages_arrive_little_later_than_the_network_delay(server: RedisServer) -> None:
    async with (
        slow_line(server.port, ONE_WAY_S) as port,
        fleet(f"redis://127.0.0.1:{port}", "a", "b", lease_s=3.0) as (a, b),
    ):
        late_s = []
        for number in range(40):
            word = b"%d" % number
            a.send(word)
            a.notes.on_news()
            late_s.append(await until(b.received(word)))
        median_s = statistics.median(late_s)
        print(f"news came after {median_s * 1e3:.0f} ms, {max(late_s) * 1e3:.0f} at most")
        assert 2 * ONE_WAY_S <= median_s < LATE_S
        assert (a.link.counters.reconnects, b.link.counters.reconnects) == (1, 1)
        assert a.link.membership.returned + b.link.membership.returned == 0
