"""Puts a router under load and checks that it gives back its files, threads and memory
afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.live.stack import MODEL, Stack, until

# Small limits, so that everything the router remembers is full long before the end.
FLAGS = (
    *("--limits-inflight-requests", "256", "--limits-hold-requests", "64"),
    *("--limits-sessions", "512", "--limits-session-blocks", "8192"),
    *("--limits-index-entries", "8192", "--limits-speculative-entries", "8192"),
    *("--limits-mirrored-blocks", "8192", "--relay", "auto"),
)
CLIENTS, MANY_CLIENTS = 12, 100
ROUTER = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.5"]
SPARE_FDS = 12  # for probe connections, which come and go
SPARE_THREADS = 8  # for pools of threads, which fill up once
SPARE_KIB = 64 << 10  # for what the router remembers, up to its limits, and the heap


@dataclass
class Load:
    """Counts the answers that clients got. Lifetime: test."""

    served: int = 0
    cut: list[int] = field(default_factory=list)  # workers whose streams broke off
    lost: list[str] = field(default_factory=list)  # outcomes that must not happen


async def client(stack: Stack, load: Load, rng: random.Random, stop: asyncio.Event) -> None:
    """Send unstreamed and streamed requests one after another until `stop`; prompts come from a few
    families.
    """
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


async def footprint(stack: Stack) -> tuple[int, int, int]:
    """Return the router's footprint: (open files without connections to workers, threads, KiB of
    memory).
    """
    proc = Path("/proc") / str(stack.router.process.pid)
    connections = sum(row["open_connections"] for row in await stack.rows())
    status = (proc / "status").read_text().splitlines()
    rss_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return len(os.listdir(proc / "fd")) - connections, len(os.listdir(proc / "task")), rss_kib


async def under_load(
    stack: Stack, load: Load, rng: random.Random, act: Awaitable[None], count: int = CLIENTS
) -> None:
    """Run `count` clients, each of which sends one request after another, until `act` is done."""
    stop = asyncio.Event()
    clients = [
        asyncio.create_task(client(stack, load, random.Random(rng.random()), stop))
        for _ in range(count)
    ]
    await act
    stop.set()
    await asyncio.gather(*clients)


async def until_as_before(
    stack: Stack, before: tuple[int, int, int], spare_kib: int = SPARE_KIB
) -> None:
    """Wait until the router's footprint is back at `before`, with some tolerance; a failure prints
    both.
    """
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
