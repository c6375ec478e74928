"""Runs two routers of the same workers that share state, as real programs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from simulator.live.processes import Programs
from tests.live.stack import Stack, engine_arguments, until

WORKERS = 3
Around = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass
class Pair:
    """Two routers of the same workers, and the answers of their clients. Lifetime: test."""

    stacks: list[Stack]
    failed: list[str] = field(default_factory=list)
    answered: int = 0

    @contextlib.asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Send requests one after the other through each router until the block ends."""
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
async def pair(
    folder: Path,
    url: str,
    speed: float,
    around: Sequence[Around] = (contextlib.nullcontext,) * 2,
    policy: str = "warmset",
) -> AsyncIterator[Pair]:
    """Yield two routers that are in sync. `around` has a context manager for each router, which is
    active while that router starts.
    """
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
        for name, while_starting in zip(("one", "two"), around, strict=True):
            ports = ["--port", "0", "--admin-port", "0", "--state", url]
            choose = ["--policy", policy, "--replicas-name", name]
            arguments = ["serve", *ports, *choose, *named]
            with while_starting():
                router = await programs.start(name, "router", arguments)
            stacks.append(Stack(programs, router, workers, http))
        for stack in stacks:
            for worker_id in range(WORKERS):
                await stack.until_state(worker_id, "ready")
        for stack in stacks:
            await until_metric(stack, "replicas_peer_in_sync", lambda n: n == 1)
        yield Pair(stacks)


async def until_metric(stack: Stack, name: str, good: Callable[[float], bool]) -> float:
    """Wait until `good` is true of a metric's value; return the seconds that it took."""
    began_s = time.monotonic()

    async def reached() -> bool:
        return good(await stack.metric(f"warmroute_{name}"))

    await until(reached, name)
    return time.monotonic() - began_s


async def requests_at_workers(stack: Stack) -> list[int]:
    return [row["inflight_requests"] for row in await stack.rows()]


async def until_equal(both: Pair) -> float:
    """Wait until both routers show the same requests at each worker; return the seconds that it
    took.
    """
    began_s = time.monotonic()

    async def equal() -> bool:
        one, two = [await requests_at_workers(stack) for stack in both.stacks]
        return one == two

    await until(equal, "both to know the same")
    return time.monotonic() - began_s
