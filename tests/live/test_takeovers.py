"""Tests that each answer is right while workers die and freeze, and the router reloads and is
replaced.

A simulated worker's tokens are a function of the prompt, so every answer, streams included, is
compared with the right one (`crowd.py`).
"""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Program
from tests.frozen import freeze
from tests.live.crowd import Crowd, crowding
from tests.live.handed_over import Routers, stage
from tests.live.stack import Stack, engine_arguments, until

SPEED = 2.0
TOKENS = 40
FLAGS = ("--migration-moves", "8", "--intervals-health-s", "0.5", "--ejection-recover-s", "0.5")
# Settings that a reload changes under load: the policy, and the limits of a request.
RELOADED = (
    "policy: hybrid\nexplain: false\ntimeouts: {total_s: 80}\n",
    "policy: least_requests\nmigration: {moves: 4}\nlimits: {client_buffer_bytes: 8192}\n",
    "policy: warmset\nno_such_key: 1\n",  # refused
    "policy: warmset\nmigration: {moves: 8}\nserver: {connections: 4096}\n",
)


@dataclass
class Ground:
    """A router with three workers, and methods that disturb them. Lifetime: test."""

    routers: Routers
    router: Program
    file: Path
    http: aiohttp.ClientSession
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)

    @property
    def stack(self) -> Stack:
        return Stack(self.routers.programs, self.router, self.routers.workers, self.http)

    async def kill(self) -> None:
        """Kill a worker with SIGKILL and start another one in its place, with an empty cache."""
        number = self.rng.randrange(len(self.routers.workers))
        worker = self.routers.workers[number]
        worker.process.kill()
        await worker.process.wait()
        port = int(worker.url.rpartition(":")[2])
        name = f"worker-{number}-{self.done.total()}"
        arguments = engine_arguments(port=port, speed=SPEED)
        again = await self.routers.programs.start(name, "engine", arguments)
        self.routers.workers[number] = again
        await self.stack.until_state(await self.id_of(worker.url), "ready")

    async def stop(self) -> None:
        """Stop a worker with SIGSTOP until the router sends it no more requests, then
        continue it.
        """
        worker = self.rng.choice(self.routers.workers)
        worker_id = await self.id_of(worker.url)
        freeze(worker.process.pid)

        async def aside() -> bool:
            return (await self.stack.row(worker_id))["state"] != "ready"

        try:
            await until(aside, f"worker {worker_id} to be put aside")
        finally:
            worker.process.send_signal(signal.SIGCONT)
        await self.stack.until_state(worker_id, "ready")

    async def reload(self) -> None:
        """Send SIGHUP once for each of several configurations, one of which is refused."""
        for text in RELOADED:
            self.file.write_text(text)
            said = "reload refused" if "no_such" in text else "reloaded; changed:"
            before = self.router.log.read_text().count(said)
            self.router.process.send_signal(signal.SIGHUP)

            async def logged(said: str = said, before: int = before) -> bool:
                return self.router.log.read_text().count(said) > before

            await until(logged, f"the log to say {said!r}")

    async def takeover(self) -> None:
        """Start a router that replaces the current one, and wait until the old one exits
        by itself.
        """
        before, number = self.router, self.done["takeover"]
        flags = "--config", str(self.file), *FLAGS
        self.router = await self.routers.start(f"router-{number + 1}", *flags)
        assert await before.process.wait() == 0

    async def id_of(self, url: str) -> int:
        (number,) = [row["id"] for row in await self.stack.rows() if row["url"] == url]
        return int(number)


@pytest.mark.parametrize(
    ("answers", "streams", "rate"),
    [
        (1_500, 12, 150.0),
        pytest.param(100_000, 24, 400.0, marks=[pytest.mark.full, pytest.mark.timeout(3_600)]),
    ],
)
async def test_every_answer_is_right_under_kills_stops_reloads_and_takeovers(
    tmp_path: Path, answers: int, streams: int, rate: float
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(RELOADED[-1])
    async with stage(tmp_path, speed=SPEED) as (routers, http):
        third = await routers.programs.start("worker-2", "engine", engine_arguments(speed=SPEED))
        routers.workers.append(third)
        router = await routers.start("router-0", "--config", str(file), *FLAGS)
        ground = Ground(routers, router, file, http, random.Random(answers))
        for number in range(3):
            await ground.stack.until_state(number, "ready")
        harms = itertools.cycle((ground.kill, ground.stop, ground.reload, ground.takeover))
        load = Crowd(router.url, streams, rate, TOKENS, stays=50, reconnects=True)
        async with crowding(load) as crowd:
            while crowd.served.total() < answers or len(ground.done) < 4:
                harm = next(harms)
                await harm()
                ground.done[harm.__name__] += 1
                assert not crowd.lost, (ground.done, crowd.summary())
        print(f"{dict(ground.done)}: {crowd.summary()}")
        assert not crowd.lost
        assert crowd.served.total() >= answers
        # A client may meet the end of an idle connection, but never with a request in flight.
        assert crowd.again <= crowd.served.total() / 100
        await ground.stack.assert_idle()
