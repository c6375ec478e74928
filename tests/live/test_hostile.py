"""A router among hostile clients: it answers or closes, and good clients notice nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.live.hostile.attackers import attack
from tests.live.hostile.corpus import refused, served
from tests.live.stack import running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPARE_FILES = 8  # probes and scrapes under way
GOOD_EVERY_S = 0.05
CALM_S = 3.0  # how long good clients are alone, for comparison
SLICES, SLICE = 20, 50_000  # a million requests, each slice to be run by itself, too
FLAGS = (
    # Longer than a good client waits for a core on a machine with other work.
    *("--server-head-s", "3", "--server-body-s", "3", "--timeouts-keep-alive-s", "1"),
    *("--ejection-failures", "1000"),
)
LOUD = ("Traceback", "failed to answer", "Error handling request", "Unhandled exception")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with running(tmp_path_factory.mktemp("logs"), workers=2, router=FLAGS) as stack:
        yield stack
        assert stack.router.process.returncode is None
        await stack.assert_idle()
        log = await asyncio.to_thread(stack.router.log.read_text)
        assert not [line for line in log.splitlines() if any(word in line for word in LOUD)]


def open_files(stack) -> int:
    return len(os.listdir(f"/proc/{stack.router.process.pid}/fd"))


@asynccontextmanager
async def good_clients(stack, what: str, clients: int = 2):
    """Clients whose every answer must be right meanwhile; tells what they waited, and before."""
    waits_s: list[float] = []
    # Each on a connection of its own: idle ones are closed after a second here.
    once = {"Connection": "close"}
    _, right = await stack.complete([5, 6, 7], once, max_tokens=8)

    async def ask() -> None:
        while True:
            began_s = time.monotonic()
            status, answer = await stack.complete([5, 6, 7], once, max_tokens=8)
            waits_s.append(time.monotonic() - began_s)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == right["choices"][0]["text"]
            await asyncio.sleep(GOOD_EVERY_S)

    asking = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        await asyncio.sleep(CALM_S)
        alone_s = tuple(waits_s)
        waits_s.clear()
        yield
    finally:
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
    assert waits_s
    print(f"good clients beside {what}: {told(waits_s)}; alone: {told(alone_s)}")


def told(waits_s) -> str:
    ranked = sorted(waits_s)
    p50, p99 = (1000 * ranked[int(len(ranked) * share)] for share in (0.5, 0.99))
    return f"{len(ranked)} right, p50 {p50:.1f} ms, p99 {p99:.1f} ms"


async def own_files(stack) -> int:
    """Open files but connections to workers, of which as many stay as were needed at once."""
    to_workers = sum(row["open_connections"] for row in await stack.rows())
    return open_files(stack) - to_workers


@asynccontextmanager
async def nothing_left(stack):
    """Files and memory of requests are as before, but for connections kept open to workers."""
    await stack.assert_idle()
    async with stack.http.get(f"{stack.admin}/health") as reply:
        await reply.read()
    before = await own_files(stack)
    yield

    async def back() -> bool:
        held = await stack.metric("warmroute_server_arriving_bytes")
        return await own_files(stack) <= before + SPARE_FILES and held == 0

    await until(back, "files and memory to be given back")
    await stack.assert_idle()


def port_of(stack) -> int:
    return int(stack.url.rpartition(":")[2])


async def attacked(stack, kind: str, count: int, seed: int) -> Counter[str]:
    """What the attackers counted; fails with what they say where they do."""
    asked = [str(port_of(stack)), str(count), str(seed)]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.live.hostile.attackers", kind, *asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, trouble = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, trouble.decode()[-3000:]
    counted = Counter(json.loads(said))
    print(f"{kind}: {dict(counted)}")
    return counted


@pytest.mark.parametrize(
    ("requests", "seed"),
    [
        (20_000, 20_000),
        *(
            pytest.param(SLICE, seed, marks=[pytest.mark.full, pytest.mark.timeout(1_800)])
            for seed in range(SLICES)
        ),
    ],
)
async def test_requests_with_faults_break_nothing(stack, requests: int, seed: int) -> None:
    async with nothing_left(stack), good_clients(stack, "mutated requests"):
        counted = await attacked(stack, "mutated", requests, seed)
    connections = counted["connections"]
    assert counted["200"] > connections / 50, counted
    assert counted["400"] > connections / 50, counted
    assert not counted["500"], counted


async def test_the_corpus_reaches_no_worker(stack) -> None:
    async def asked() -> float:
        return await stack.metric("warmroute_decisions_total")

    async def answered(requests: list[bytes]) -> None:
        port = port_of(stack)
        await asyncio.gather(*(attack(port, [data], True, counted) for data in requests))

    before = await asked()
    counted: Counter[str] = Counter()
    async with nothing_left(stack):
        await answered([data for _, _, data in refused()])
        assert await asked() == before
        right = [data for _, data in served()]
        await answered(right)
        assert await asked() == before + len(right)
    assert counted["200"] == len(right)


@pytest.mark.parametrize(
    "connections",
    [500, pytest.param(5_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
)
async def test_many_slow_clients_disturb_nobody(tmp_path, connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The router lets in half as many as it may open files, and good clients come on top.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 3 * connections)), hard))
    async with (
        running(tmp_path, workers=1, router=("--server-head-s", "5")) as stack,
        nothing_left(stack),
        good_clients(stack, f"{connections} slow ones"),
    ):
        counted = await attacked(stack, "slow", connections, 1)
    assert counted["ended"] == connections
    assert counted["503"] == 0, "the server was full"
