"""Tests of five minutes of each fault under 200 open streams and 200 requests a second: no answer
is lost.

Every answer is checked token by token (`crowd.py`); streams whose worker fails continue at another
worker. Quick tests do the same for seconds with a smaller crowd.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from router.admin.kv_view import decode_kv_view
from simulator.live.processes import Program
from tests.live.cache_pool import differences, truth_of
from tests.live.chaos import footprint, until_as_before
from tests.live.crowd import Crowd, crowding
from tests.live.faulty_front import FaultyFront, Harm, faulty
from tests.live.stack import Stack, engine_arguments, running, until

FULL_S, SHORT_S = 300.0, 3.0
FULL = [pytest.mark.full, pytest.mark.timeout(900)]
TOKENS = 40
# Slow enough for streams that stay open for seconds, and for other work on this machine.
SPEED = 0.1
ROUTER = [
    *("--timeouts-keep-alive-s", "3600"),  # a client's connection is not closed under a request
    *("--migration-moves", "8", "--timeouts-between-bytes-s", "8"),
    *("--intervals-health-s", "0.5", "--ejection-recover-s", "0.5"),
]
# Clients share the cores with the programs that they load. They try 200 requests a second and
# report what they reached; below this rate the streams hardly had company.
LEAST_PER_S = 30.0
SLOW_S = 6.0  # between two tokens that take some 60 ms: to 1 %


@dataclass(frozen=True)
class Ground:
    """A router and the workers to disturb; the third worker is behind the faulty proxy `front`.
    Lifetime: test.
    """

    stack: Stack
    front: FaultyFront
    until_s: float
    rng: random.Random

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until_s

    async def pause(self, least_s: float, most_s: float) -> None:
        """Wait `least_s` to `most_s` seconds, or a shorter time if the test ends sooner."""
        left_s = max(self.until_s - time.monotonic(), SHORT_S / 3)
        await asyncio.sleep(min(self.rng.uniform(least_s, most_s), left_s))

    async def dies(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        process = self.stack.workers[number].process
        process.send_signal(how)
        await process.wait()

    async def starts(self, number: int) -> None:
        """Start another engine at the same port, with an empty cache."""
        port = int(self.stack.workers[number].url.rpartition(":")[2])
        name = f"worker-{number}-{time.monotonic_ns()}"
        arguments = engine_arguments(port=port, speed=SPEED)
        started = await self.stack.programs.start(name, "engine", arguments)
        self.stack.workers[number] = started
        await self.stack.until_state(number, "ready")


async def kill(ground: Ground) -> None:
    """Kill an engine with SIGKILL; start another one some seconds later."""
    number = ground.rng.randrange(2)
    await ground.dies(number)
    await ground.pause(1, 8)
    await ground.starts(number)
    await ground.pause(1, 8)


async def restart(ground: Ground) -> None:
    """Stop an engine as an operator does and start it again at once, with an empty cache."""
    number = ground.rng.randrange(2)
    await ground.dies(number, signal.SIGTERM)
    await ground.starts(number)
    await ground.pause(1, 8)


async def stop(ground: Ground) -> None:
    """Stop an engine with SIGSTOP, sometimes for longer than the router lets streams be silent."""
    process = ground.stack.workers[ground.rng.randrange(2)].process
    process.send_signal(signal.SIGSTOP)
    try:
        await ground.pause(0.2, 14)
    finally:
        process.send_signal(signal.SIGCONT)
    await ground.pause(2, 8)


async def all_but_one(ground: Ground) -> None:
    """Kill all engines except the one behind the faulty proxy."""
    await asyncio.gather(ground.dies(0), ground.dies(1))
    await ground.pause(4, 12)
    await asyncio.gather(ground.starts(0), ground.starts(1))
    await ground.pause(4, 12)


def answers(harm: Harm) -> Callable[[Ground], Awaitable[None]]:
    """Return a function that damages one worker's answers for some time and then stops."""

    async def harming(ground: Ground) -> None:
        ground.front.harm = harm
        await ground.pause(2, 8)
        ground.front.harm = "none"
        await ground.pause(1, 4)

    return harming


HARMS: dict[str, Callable[[Ground], Awaitable[None]]] = {
    "kill": kill,
    "restart": restart,
    "stop": stop,
    "all_but_one": all_but_one,
    **{harm: answers(harm) for harm in ("reset", "cut", "torn", "garbage", "garbled", "slow")},
}


@asynccontextmanager
async def standing(log_dir: Path, seconds: float) -> AsyncIterator[Ground]:
    async with running(log_dir, workers=2, router=ROUTER, speed=SPEED) as stack:
        engine = await stack.programs.start("behind", "engine", engine_arguments(speed=SPEED))
        # With aiohttp's default of 100 connections, the router's probes would wait behind streams,
        # and a healthy worker would seem to hang just when it must take the others' streams.
        unbound = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=unbound) as passing,
            faulty(engine.url, passing) as front,
        ):
            front.slow_s = SLOW_S
            await stack.add(front.url)
            yield Ground(stack, front, time.monotonic() + seconds, random.Random(seconds))


@pytest.mark.parametrize(
    ("harm", "seconds", "streams", "rate"),
    [
        ("kill", SHORT_S, 20, 20.0),  # the fault after which the most must be repaired
        *(pytest.param(harm, FULL_S, 200, 200.0, marks=FULL) for harm in HARMS),
    ],
)
async def test_requests_that_another_worker_can_serve_survive_repeated_faults(
    tmp_path: Path, harm: str, seconds: float, streams: int, rate: float
) -> None:
    async with standing(tmp_path, seconds) as ground:
        stack = ground.stack
        async with crowding(Crowd(stack.url, streams, rate, TOKENS)):
            pass  # pools of threads, buffers and caches fill up once
        await stack.assert_idle()
        before, harms = await footprint(stack), 0
        async with crowding(Crowd(stack.url, streams, rate, TOKENS)) as crowd:
            while ground.has_time or not harms:
                assert not crowd.lost, crowd.summary()
                await HARMS[harm](ground)
                harms += 1
        moved = await stack.metric("warmroute_migrations_total")
        print(f"{harm}: {harms} harms, {ground.front.harmed} to answers, {moved:g} moved")
        print(crowd.summary())
        assert stack.router.process.returncode is None
        assert not crowd.lost
        assert crowd.served["stream"] > streams
        assert rate < LEAST_PER_S or crowd.begun_per_s() >= LEAST_PER_S
        await stack.assert_idle()
        await until_as_before(stack, before)
        for number, worker in enumerate(stack.workers):
            await no_false_belief(stack, number, worker)


async def no_false_belief(stack: Stack, number: int, worker: Program) -> None:
    """Wait until the router's index has no block that the worker lacks; the worker may have been
    restarted.
    """

    async def true() -> bool:
        async with stack.http.get(f"{stack.admin}/kv?worker={number}") as reply:
            view = decode_kv_view(await reply.read())
        async with stack.http.get(f"{worker.url}/kv_snapshot") as reply:
            _, held = truth_of(await reply.read())
        _, extra = differences(view, held)
        return extra == 0

    await until(true, f"no block in the index that worker {number} has not")
