"""A router and its workers, timed or computing, as separate programs on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from simulator.processes import Program, Programs
from simulator.scrape import ScrapeError, fetch_totals, fetch_workers

MODEL = "demo"
STARTS_AT_ONCE = 4  # starting more Python programs than cores at once only makes all late
SETTLE_S = 10.0  # within this, counters of a finished run must have come back to zero
SETTLE_POLL_S = 0.05
LOAD_COUNTERS = ("inflight_requests", "queued_prefill_tokens", "context_tokens")


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What is started. Lifetime: run."""

    policy: str
    workers: int = 8
    profile: str = "qwen3-32b-h100-tp2"
    speed: float = 1.0  # model seconds per wall second
    block_size: int = 64  # tokens; large blocks keep hashing and events cheap for two cores
    kv_tokens: int | None = None  # None: what the profile's GPUs hold
    port: int = 0  # of the router; 0: the system picks
    admin_port: int = 0  # of the router; 0: the system picks
    hold_s: float | None = None  # longest wait at the router, wall clock; None: its default
    model: Path | None = None  # a model's folder: workers compute, on CPUs, and nothing is timed


@dataclass(frozen=True, slots=True)
class Stack:
    """The programs of one run. Lifetime: run."""

    router: Program
    workers: tuple[Program, ...]

    @property
    def urls(self) -> list[str]:
        """Base addresses of the workers."""
        return [worker.url for worker in self.workers]

    @property
    def admin(self) -> str:
        """Base address of the router's admin port."""
        return self.router.facts["admin"]

    def check(self) -> None:
        """Raises `StartError` if one of the programs has ended."""
        for program in (self.router, *self.workers):
            program.check()


@asynccontextmanager
async def running_stack(settings: StackSettings, log_dir: Path) -> AsyncIterator[Stack]:
    """Starts the workers, then the router in front of them; ends all on the way out."""
    async with Programs(log_dir) as programs:
        workers = await _start_workers(programs, settings)
        arguments = ["serve", "--port", str(settings.port)]
        arguments += ["--admin-port", str(settings.admin_port)]
        arguments += ["--policy", settings.policy]
        if settings.hold_s is not None:
            arguments += ["--limits-hold-s", f"{settings.hold_s:g}"]
        for worker in workers:
            arguments += ["--worker", worker.url]
        router = await programs.start("router", "router", arguments)
        yield Stack(router, workers)


async def _start_workers(programs: Programs, settings: StackSettings) -> tuple[Program, ...]:
    # Several processes share the machine's cores: one thread each, or they wait for each other.
    arguments = ["serve", str(settings.model), "--port", "0", "--threads", "1"]
    if settings.model is None:
        arguments = ["--port", "0", "--timed", settings.profile, "--speed", f"{settings.speed:g}"]
    arguments += ["--block-size", str(settings.block_size), "--model-name", MODEL]
    if settings.kv_tokens is not None:
        flag = "--kv-tokens" if settings.model is None else "--max-tokens-in-paged-kv-cache"
        arguments += [flag, str(settings.kv_tokens)]
    places = asyncio.Semaphore(STARTS_AT_ONCE)

    async def one(number: int) -> Program:
        async with places:
            return await programs.start(f"worker-{number}", "engine", arguments)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(settings.workers)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first says it; the rest follow from it
    return tuple(task.result() for task in tasks)


async def wait_until_routable(stack: Stack, session: aiohttp.ClientSession) -> None:
    """Returns when the router uses every worker and hears its events; else `ScrapeError`."""
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    rows = await router_workers(stack, session)
    while not all(row["state"] == "ready" and row["events"] for row in rows):
        if asyncio.get_running_loop().time() > deadline_s:
            raise ScrapeError(f"{stack.admin}/workers: not ready after {SETTLE_S:g} s: {rows}")
        await asyncio.sleep(SETTLE_POLL_S)
        rows = await router_workers(stack, session)


async def router_workers(stack: Stack, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """The router's own rows of its workers; raises `ScrapeError`."""
    try:
        async with session.get(f"{stack.admin}/workers") as reply:
            body = await reply.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ScrapeError(f"{stack.admin}/workers: {error or type(error).__name__}") from error
    rows: list[dict[str, Any]] = body["workers"] if isinstance(body, dict) else body
    return rows


async def worker_names(stack: Stack, session: aiohttp.ClientSession) -> dict[str, str]:
    """What the router calls each worker -> `worker 0`, `worker 1`, in the order of `urls`."""
    rows = await router_workers(stack, session)
    by_url = {row["url"].rstrip("/"): str(row["id"]) for row in rows}
    return {by_url[url]: f"worker {number}" for number, url in enumerate(stack.urls)}


async def leftovers(stack: Stack, session: aiohttp.ClientSession) -> list[str]:
    """Load counters that are not back to zero `SETTLE_S` after a run, one line each; [] is right.

    Asks the router's ledger, its gauge of requests in flight, and every worker's queue.
    """
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while found := await _not_zero(stack, session):
        if asyncio.get_running_loop().time() > deadline_s:
            break
        await asyncio.sleep(SETTLE_POLL_S)
    return found


async def _not_zero(stack: Stack, session: aiohttp.ClientSession) -> list[str]:
    found = []
    for number, row in enumerate(await router_workers(stack, session)):
        found += [
            f"router: worker {number} {key} = {row[key]}" for key in LOAD_COUNTERS if row[key]
        ]
    totals = await fetch_totals(session, stack.admin)
    if totals["warmroute_inflight_requests"]:
        found.append(f"router: inflight_requests = {totals['warmroute_inflight_requests']:g}")
    for number, counters in enumerate(await fetch_workers(session, stack.urls)):
        if counters.running or counters.waiting:
            found.append(
                f"worker {number}: running = {counters.running:g}, waiting = {counters.waiting:g}"
            )
    return found
