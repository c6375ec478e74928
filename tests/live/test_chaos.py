"""Tests that no request is lost and nothing leaks while workers die, freeze, join and leave under
load.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from simulator.live.processes import Program
from tests.live.chaos import (
    CLIENTS,
    FLAGS,
    MANY_CLIENTS,
    ROUTER,
    Load,
    footprint,
    under_load,
    until_as_before,
)
from tests.live.stack import Stack, engine_arguments, running, until

SHORT_S, FULL_S = 6.0, 180.0
pytestmark = pytest.mark.alone
FULL = [pytest.mark.full, pytest.mark.timeout(400)]
HEAP_KIB = 32 << 10  # for the heap alone, when all that the router remembers was full before


@dataclass
class Storm:
    """Kills, freezes and removes workers, but never all at once. Lifetime: test."""

    stack: Stack
    extra: Program  # a worker that joins and leaves
    rng: random.Random
    hit: set[int] = field(default_factory=set)  # workers whose streams may have been cut
    done: list[str] = field(default_factory=list)
    extra_id: int | None = None
    restarts: int = 0

    async def blow(self, until_s: float) -> None:
        harms = [self.kill, self.freeze, self.swing]
        while time.monotonic() < until_s:
            await self.rng.choice(harms)()
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))

    async def kill(self) -> None:
        """Kill a worker with SIGKILL and start another one at the same port."""
        number = self.rng.randrange(len(self.stack.workers))
        worker = self.stack.workers[number]
        self.done.append(f"kill {number}")
        self.hit.add(number)
        worker.process.send_signal(signal.SIGKILL)
        await worker.process.wait()
        port = int(worker.url.rpartition(":")[2])
        self.restarts += 1
        name = f"worker-{number}-{self.restarts}"
        again = await self.stack.programs.start(name, "engine", engine_arguments(port=port))
        self.stack.workers[number] = again
        await self.stack.until_state(number, "ready")

    async def freeze(self) -> None:
        number = self.rng.randrange(len(self.stack.workers))
        self.done.append(f"freeze {number}")
        process = self.stack.workers[number].process
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.05, 1.5))
        process.send_signal(signal.SIGCONT)

    async def swing(self) -> None:
        """Add the extra worker to the pool; if it is there, remove it at once or when it
        is idle.
        """
        if self.extra_id is None:
            self.done.append("add")
            self.extra_id = await self.stack.add(self.extra.url)
            return
        force = self.rng.random() < 0.5
        self.done.append("remove" if force else "drain and remove")
        worker_id, self.extra_id = self.extra_id, None
        if force:
            self.hit.add(worker_id)
        url = f"{self.stack.admin}/workers/{worker_id}?force={str(force).lower()}"
        async with self.stack.http.delete(url) as reply:
            assert reply.status in (200, 202), await reply.text()

        async def gone() -> bool:
            return all(row["id"] != worker_id for row in await self.stack.rows())

        await until(gone, f"worker {worker_id} to be gone")


@pytest.mark.parametrize(
    ("seed", "seconds", "clients", "moves"),
    [
        (7, SHORT_S, CLIENTS, 0),
        pytest.param(8, FULL_S, CLIENTS, 0, marks=FULL),
        pytest.param(9, FULL_S, MANY_CLIENTS, 4, marks=FULL),
    ],
)
async def test_under_random_faults_every_servable_request_is_served(
    tmp_path: Path, seed: int, seconds: float, clients: int, moves: int
) -> None:
    rng = random.Random(seed)
    # What the router remembers is full after the first half; growth after that is a leak.
    router = [*ROUTER, *FLAGS, "--migration-moves", str(moves)]
    async with running(tmp_path, workers=3, router=router) as stack:
        extra = await stack.programs.start("extra", "engine", engine_arguments())
        storm = Storm(stack, extra, rng)
        load = Load()

        async def storms() -> None:
            await under_load(stack, load, rng, storm.blow(time.monotonic() + seconds / 2), clients)
            await stack.assert_idle()

        await storms()
        before = await footprint(stack)
        await storms()
        moved = await stack.metric(
            'warmroute_migrations_total{reason="early_close",result="moved"}'
        )
        story = f"seed {seed}: {storm.done}"
        print(
            f"{load.served} served, {len(load.cut)} cut, {moved:g} moved, {len(storm.done)} harms"
        )
        assert stack.router.process.returncode is None, story
        assert not load.lost, (story, load.lost)
        assert set(load.cut) <= storm.hit, (story, load.cut)
        assert load.served > 40 * CLIENTS, story
        await until_as_before(stack, before, HEAP_KIB)
