"""Workers die, freeze, join and leave in any order under load: nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Program
from tests.live.stack import MODEL, Stack, engine_arguments, running, until
from tests.live.test_memory import FLAGS

CLIENTS, MANY_CLIENTS = 12, 100
SHORT_S, FULL_S = 6.0, 180.0
ROUTER = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.5"]
pytestmark = pytest.mark.alone
FULL = [pytest.mark.full, pytest.mark.timeout(400)]
SPARE_FDS = 12  # probe connections come and go
SPARE_THREADS = 8  # pools of threads fill up once
SPARE_KIB = 64 << 10  # what is remembered, up to its limits, and the heap
HEAP_KIB = 32 << 10  # the heap alone, where all that is remembered was full before


@dataclass
class Load:
    """What clients met. Lifetime: test."""

    served: int = 0
    cut: list[int] = field(default_factory=list)  # workers whose streams broke off
    lost: list[str] = field(default_factory=list)  # what must not happen


async def client(stack: Stack, load: Load, rng: random.Random, stop: asyncio.Event) -> None:
    """Ask again and again: plain and streamed, from a few families of prompts."""
    async with aiohttp.ClientSession() as http:
        while not stop.is_set():
            family = rng.randrange(6)
            prompt = [family * 1000 + i for i in range(320)] + [rng.randrange(30_000)]
            stream = rng.random() < 0.5
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": stream}
            try:
                await one_request(http, stack.url, body, load)
            except (aiohttp.ClientError, TimeoutError) as error:
                load.lost.append(f"{'stream' if stream else 'plain'}: {error!r}")


async def one_request(
    http: aiohttp.ClientSession, url: str, body: dict[str, object], load: Load
) -> None:
    timeout = aiohttp.ClientTimeout(total=30)
    async with http.post(f"{url}/v1/completions", json=body, timeout=timeout) as reply:
        if reply.status != 200:
            load.lost.append(f"{reply.status}: {await reply.text()}")
            return
        if not body["stream"]:
            assert json.loads(await reply.read())["usage"]["completion_tokens"] == 8
            load.served += 1
            return
        worker_id = int(reply.headers["x-warmroute-worker"])
        try:
            data = await reply.read()
        except aiohttp.ClientPayloadError:
            load.cut.append(
                worker_id
            )  # after its first byte: whether that is right is judged later
            return
        if data.rstrip().endswith(b"data: [DONE]"):
            load.served += 1
        else:
            load.lost.append(f"a stream without end from worker {worker_id}")


@dataclass
class Storm:
    """Does harm to workers, never to all at once. Lifetime: test."""

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
        """kill -9, and another start at the same port."""
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
        """Add the extra worker; or remove it, at once or when it is idle."""
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


async def footprint(stack: Stack) -> tuple[int, int, int]:
    """(open files besides connections to workers, threads, KiB of memory) of the router."""
    proc = Path("/proc") / str(stack.router.process.pid)
    connections = sum(row["open_connections"] for row in await stack.rows())
    status = (proc / "status").read_text().splitlines()
    rss_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return len(os.listdir(proc / "fd")) - connections, len(os.listdir(proc / "task")), rss_kib


async def under_load(
    stack: Stack, load: Load, rng: random.Random, act: Awaitable[None], count: int = CLIENTS
) -> None:
    """Clients ask without a pause until `act` is over."""
    stop = asyncio.Event()
    clients = [
        asyncio.create_task(client(stack, load, random.Random(rng.random()), stop))
        for _ in range(count)
    ]
    await act
    stop.set()
    await asyncio.gather(*clients)


@pytest.mark.parametrize(
    ("seed", "seconds", "clients", "moves"),
    [
        (7, SHORT_S, CLIENTS, 0),
        pytest.param(8, FULL_S, CLIENTS, 0, marks=FULL),
        pytest.param(9, FULL_S, MANY_CLIENTS, 4, marks=FULL),
    ],
)
async def test_under_chaos_everything_that_could_be_served_was(
    tmp_path: Path, seed: int, seconds: float, clients: int, moves: int
) -> None:
    rng = random.Random(seed)
    # What it remembers is full after the first half: what grows then is lost.
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


async def until_as_before(
    stack: Stack, before: tuple[int, int, int], spare_kib: int = SPARE_KIB
) -> None:
    """Until its footprint is what it was; a failure says what it is."""
    spare = SPARE_FDS, SPARE_THREADS, spare_kib
    now = before

    async def as_before() -> bool:
        nonlocal now
        now = await footprint(stack)
        return all(n <= b + more for n, b, more in zip(now, before, spare, strict=True))

    try:
        await until(as_before, "files, threads, memory as before")
    except AssertionError as error:
        error.add_note(f"files, threads, KiB: {before} before, {now} after")
        raise
