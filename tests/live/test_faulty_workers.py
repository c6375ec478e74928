"""Tests of one faulty worker under load: clients see no fault that another worker can prevent."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from tests.frozen import freeze
from tests.live.chaos import CLIENTS, ROUTER, Load, footprint, under_load, until_as_before
from tests.live.faulty_front import FaultyFront, Harm, faulty
from tests.live.stack import MODEL, Stack, engine_arguments, running, until

SHORT_S, FULL_S = 1.0, 300.0
FULL = [pytest.mark.full, pytest.mark.timeout(600)]
QUICK = ["--ejection-recover-s", "0.2"]  # so that a test does not have to wait
HARMS: tuple[Harm, ...] = ("reset", "cut", "garbage", "garbled", "slow", "status_500")
CI_HARMS = "cut", "garbled", "slow"  # harm to answers that had begun, which is harder to repair


async def harm_for(front: FaultyFront, harm: Harm, seconds: float) -> None:
    """Damage answers for some seconds, and go on until at least one was damaged."""
    front.harm = harm
    await asyncio.sleep(seconds)

    async def done() -> bool:
        return front.harmed >= 3

    await until(done, "harm to be done")
    front.harm = "none"


@pytest.mark.parametrize(
    ("harm", "seconds"),
    [
        *(pytest.param(one, SHORT_S, marks=() if one in CI_HARMS else FULL) for one in HARMS),
        *(pytest.param(one, FULL_S, marks=FULL) for one in HARMS),
    ],
)
async def test_requests_that_fail_at_one_worker_succeed_at_another(
    tmp_path: Path, harm: Harm, seconds: float
) -> None:
    async with running(tmp_path, workers=2, router=[*ROUTER, *QUICK]) as stack:
        engine = await stack.programs.start("behind", "engine", engine_arguments())
        async with faulty(engine.url, stack.http) as front:
            worker_id = await stack.add(front.url)
            rng, load = random.Random(harm), Load()

            async def warm() -> bool:
                return load.served >= 10 * CLIENTS

            await under_load(stack, load, rng, until(warm, "the first answers"))
            before = await footprint(stack)
            served = load.served
            await under_load(stack, load, rng, harm_for(front, harm, seconds))
            assert not load.lost
            assert set(load.cut) <= ({worker_id} if harm in ("cut", "garbled") else set())
            assert load.served > served

            async def back() -> bool:
                return bool((await stack.row(worker_id))["state"] == "ready")

            # The worker is taken back by a request that it answers, so there must be requests.
            await under_load(stack, load, rng, until(back, f"worker {worker_id} to be taken back"))
            assert not load.lost
            await stack.assert_idle()
            await until_as_before(stack, before)


async def test_eighty_refused_requests_change_no_workers_state(tmp_path: Path) -> None:
    async with (
        running(tmp_path, workers=1, router=[*ROUTER, "--policy", "round_robin"]) as stack,
        faulty(stack.workers[0].url, stack.http) as front,
    ):
        worker_id = await stack.add(front.url)
        front.harm = "status_400"
        statuses = [(await stack.complete([n] * 40))[0] for n in range(160)]
        assert statuses.count(400) == front.harmed == 80
        assert set(statuses) == {200, 400}
        row = await stack.row(worker_id)
        assert (row["state"], row["failures"]) == ("ready", 0)
        for name in ("ejections", "ejections_withheld", "retries", "worker_failures"):
            assert await stack.metric(f"warmroute_{name}_total") == 0
        await stack.assert_idle()


async def test_with_all_workers_but_one_dead_the_last_serves(tmp_path: Path) -> None:
    async with running(tmp_path, workers=4, router=[*ROUTER, *QUICK]) as stack:
        load, rng = Load(), random.Random(3)

        async def die() -> None:
            await asyncio.sleep(0.3)
            for worker in stack.workers[:3]:
                worker.process.send_signal(signal.SIGKILL)
            served = load.served

            async def served_on() -> bool:
                return load.served >= served + 5 * CLIENTS

            await until(served_on, "the last worker to serve everybody")

        await under_load(stack, load, rng, die())
        assert not load.lost
        assert set(load.cut) <= {0, 1, 2}
        await stack.assert_idle()


async def test_a_stopped_worker_gets_no_new_request_and_its_streams_continue_later(
    tmp_path: Path,
) -> None:
    """A worker that stops responding gets no new request before probes find it down, which takes
    seconds by default, and its streams continue when it does.
    """
    async with running(tmp_path, workers=2, router=QUICK, speed=1) as stack:
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 400, "stream": True}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body) as stream:
            worker_id = int(stream.headers["x-warmroute-worker"])
            await stream.content.readline()
            process = stack.workers[worker_id].process
            freeze(process.pid)
            try:
                stopped_s = time.monotonic()

                async def aside() -> bool:
                    return "keeps failing (stalled)" in stack.router.log.read_text()

                await until(aside, "the worker to be put aside")
                took_s = time.monotonic() - stopped_s
                assert "is down" not in stack.router.log.read_text(), f"it took {took_s:.1f} s"
                assert (await stack.row(worker_id))["state"] == "ejected"
                status, _ = await stack.complete([1] * 64)
                assert status == 200
            finally:
                process.send_signal(signal.SIGCONT)
            assert (await stream.read()).rstrip().endswith(b"data: [DONE]")
        await taken_back(stack, worker_id)
        await stack.assert_idle()


async def taken_back(stack: Stack, worker_id: int) -> None:
    """Send requests until the router has tried the worker again and uses it as before."""

    async def ready() -> bool:
        await stack.complete([random.randrange(1000)] * 48)
        return bool((await stack.row(worker_id))["state"] == "ready")

    await until(ready, f"worker {worker_id} to be taken back")
