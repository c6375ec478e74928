"""Starts routers and their workers as programs on loopback, and runs one workload on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from simulator.live.client import Target
from simulator.live.load import OnOutcome, Workload, run_load
from simulator.live.outcome import Outcome, ResultRow, summarize
from simulator.live.processes import Program, Programs
from simulator.live.scrape import (
    Sample,
    ScrapeError,
    fetch_totals,
    fetch_workers,
    pool_samples,
    sample_forever,
)
from simulator.replay.result import Samples

MODEL = "warmroute-timed"  # as a timed worker that is started by itself
STARTS_AT_ONCE = 4  # starting more Python programs than cores at once only makes all late
SETTLE_S = 10.0  # within this, counters of a finished run must have come back to zero
SETTLE_POLL_S = 0.05
LOAD_COUNTERS = ("inflight_requests", "queued_prefill_tokens", "context_tokens")


@dataclass(frozen=True, slots=True)
class StackSettings:
    """The settings of the programs that one run starts. Lifetime: run."""

    policy: str
    workers: int = 8
    profile: str = "qwen3-32b-h100-tp2"
    speed: float = 1.0  # model seconds per wall second
    block_size: int = 64  # tokens; large blocks keep hashing and events cheap for two cores
    kv_tokens: int | None = None  # None: what the profile's GPUs hold
    port: int = 0  # of the first router; 0: the system picks
    admin_port: int = 0  # of the first router; 0: the system picks
    hold_s: float | None = None  # longest wait at the router, wall clock; None: its default
    model: Path | None = None  # a model's folder: workers compute, on CPUs, and nothing is timed
    routers: int = 1  # of the same workers; requests go to them in turn
    state: str | None = None  # URL of the Redis through which routers share state; None: none
    router_flags: tuple[str, ...] = ()  # more of them, for each router


@dataclass(frozen=True, slots=True)
class ProgramStack:
    """The programs that were started for one run. Lifetime: run."""

    routers: tuple[Program, ...]
    workers: tuple[Program, ...]

    @property
    def router(self) -> Program:
        """The first router."""
        return self.routers[0]

    @property
    def urls(self) -> list[str]:
        """The base addresses of the workers."""
        return [worker.url for worker in self.workers]

    @property
    def admin(self) -> str:
        """The base address of the admin port of the first router."""
        return self.router.facts["admin"]

    @property
    def admins(self) -> list[str]:
        """The base addresses of the admin ports of all routers."""
        return [router.facts["admin"] for router in self.routers]

    def check(self) -> None:
        """Raise `StartError` if one of the programs has ended."""
        for program in (*self.routers, *self.workers):
            program.check()


@asynccontextmanager
async def running_stack(settings: StackSettings, log_dir: Path) -> AsyncIterator[ProgramStack]:
    """Start the workers, then the routers in front of them; end all programs when the context is
    left.
    """
    async with Programs(log_dir) as programs:
        workers = await _start_workers(programs, settings)
        first = await programs.start("router", "router", _router_arguments(settings, workers, 0))
        more = [
            await programs.start(f"router-{n}", "router", _router_arguments(settings, workers, n))
            for n in range(1, settings.routers)
        ]
        yield ProgramStack((first, *more), workers)


def _router_arguments(
    settings: StackSettings, workers: Sequence[Program], number: int
) -> list[str]:
    ports = (0, 0) if number else (settings.port, settings.admin_port)
    arguments = ["serve", "--port", str(ports[0]), "--admin-port", str(ports[1])]
    arguments += ["--policy", settings.policy]
    if settings.hold_s is not None:
        arguments += ["--limits-hold-s", f"{settings.hold_s:g}"]
    if settings.state is not None:
        arguments += ["--state", settings.state, "--replicas-name", f"router-{number}"]
    for worker in workers:
        arguments += ["--worker", worker.url]
    return [*arguments, *settings.router_flags]


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
        raise failures.exceptions[0] from failures  # the first error is the cause of the others
    return tuple(task.result() for task in tasks)


async def wait_until_routable(stack: ProgramStack, session: aiohttp.ClientSession) -> None:
    """Wait until each router uses every worker and receives its events, and routers that share
    state are in sync.

    Raises `ScrapeError` if that takes longer than SETTLE_S seconds.
    """
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while missing := await _not_routable(stack, session):
        if asyncio.get_running_loop().time() > deadline_s:
            raise ScrapeError(f"{missing}: not ready after {SETTLE_S:g} s")
        await asyncio.sleep(SETTLE_POLL_S)


async def _not_routable(stack: ProgramStack, session: aiohttp.ClientSession) -> str:
    """Return a text about the first router or worker that is not ready, with the address that
    reported it; "" if all are ready.
    """
    for admin in stack.admins:
        rows = await router_workers(admin, session)
        if not all(row["state"] == "ready" and row["events"] for row in rows):
            return f"{admin}/workers: {rows}"
        totals = await fetch_totals(session, admin)
        in_sync = totals.get("warmroute_replicas_peer_in_sync", 0.0)
        if "warmroute_replicas_link_up" in totals and in_sync != len(stack.routers) - 1:
            return f"{admin}/metrics: in sync with {in_sync:g} of {len(stack.routers) - 1}"
    return ""


async def router_workers(admin: str, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """Return the rows of a router's `/workers` page. Raises `ScrapeError`."""
    try:
        async with session.get(f"{admin}/workers") as reply:
            body = await reply.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ScrapeError(f"{admin}/workers: {error or type(error).__name__}") from error
    rows: list[dict[str, Any]] = body["workers"] if isinstance(body, dict) else body
    return rows


async def worker_names(stack: ProgramStack, session: aiohttp.ClientSession) -> dict[str, str]:
    """Return a name (`worker 0`, `worker 1`, in the order of `urls`) for each id that the routers
    give to a worker. All routers were given the same list of workers, so their ids are the same.
    """
    rows = await router_workers(stack.admin, session)
    by_url = {row["url"].rstrip("/"): str(row["id"]) for row in rows}
    return {by_url[url]: f"worker {number}" for number, url in enumerate(stack.urls)}


async def leftovers(stack: ProgramStack, session: aiohttp.ClientSession) -> list[str]:
    """Return a line for each load counter that is not zero `SETTLE_S` seconds after a run; the list
    should be empty. The counters are each router's ledger, its gauge of requests in flight, and
    every worker's queue.
    """
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while found := await _not_zero(stack, session):
        if asyncio.get_running_loop().time() > deadline_s:
            break
        await asyncio.sleep(SETTLE_POLL_S)
    return found


async def _not_zero(stack: ProgramStack, session: aiohttp.ClientSession) -> list[str]:
    found = []
    for router, admin in zip(stack.routers, stack.admins, strict=True):
        for number, row in enumerate(await router_workers(admin, session)):
            found += [
                f"{router.name}: worker {number} {key} = {row[key]}"
                for key in LOAD_COUNTERS
                if row[key]
            ]
        totals = await fetch_totals(session, admin)
        if totals["warmroute_inflight_requests"]:
            inflight = totals["warmroute_inflight_requests"]
            found.append(f"{router.name}: inflight_requests = {inflight:g}")
    for number, counters in enumerate(await fetch_workers(session, stack.urls)):
        if counters.running or counters.waiting:
            found.append(
                f"worker {number}: running = {counters.running:g}, waiting = {counters.waiting:g}"
            )
    return found


SAMPLES_PER_RUN = 40
MIN_SAMPLE_S = 0.5  # wall clock: asking eight workers more often costs the cores they run on


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of one run. Lifetime: process."""

    row: ResultRow
    outcomes: tuple[Outcome, ...]  # `worker` is one of `workers`
    samples: Samples  # none where workers give no counters
    workers: tuple[str, ...]
    leftovers: tuple[str, ...]  # load counters that did not come back to zero


@asynccontextmanager
async def _own_ports(stack: ProgramStack) -> AsyncIterator[Sequence[str]]:
    """Yield the base addresses at which the routers serve clients themselves."""
    yield [router.url for router in stack.routers]


async def run_scenario(
    workload: Workload,
    settings: StackSettings,
    log_dir: Path,
    on_outcome: OnOutcome,
    served: Callable[[ProgramStack], AbstractAsyncContextManager[Sequence[str]]] = _own_ports,
) -> RunResult:
    """Run `workload`, whose arrivals are in model time, on programs started for it with `settings`.

    `served` yields the base addresses to which requests go in turn, if another data plane stands
    before the routers. Raises `StartError` if a program does not start or dies, `ScrapeError` if
    one does not answer. All started programs have ended when this function returns or raises.
    """
    outcomes: list[Outcome] = []
    samples: list[Sample] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    async with (
        running_stack(settings, log_dir) as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        AsyncExitStack() as front,
    ):
        await wait_until_routable(stack, session)
        names = await worker_names(stack, session)
        before = await fetch_workers(session, stack.urls)
        first, *others = await front.enter_async_context(served(stack))
        target = Target(first, MODEL, workload.block_tokens, others=tuple(others))
        interval_s = max(MIN_SAMPLE_S, workload.span_s / settings.speed / SAMPLES_PER_RUN)
        try:
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(
                    sample_forever(session, stack.urls, interval_s, samples)
                )
                await run_load(workload, target, note, settings.speed)
                sampling.cancel()
            found = await leftovers(stack, session)
            after = await fetch_workers(session, stack.urls)
        except ExceptionGroup as failures:
            stack.check()  # the error of a dead program explains more than a failed request
            raise failures.exceptions[0] from failures
        except ScrapeError:
            stack.check()
            raise
    named = [_named(outcome, names) for outcome in outcomes]
    workers = tuple(names.values())
    row = summarize(settings.policy, workload.name, named, workers, before, after, settings.speed)
    return RunResult(
        row, tuple(named), pool_samples(samples, settings.speed), workers, tuple(found)
    )


def _named(outcome: Outcome, names: dict[str, str]) -> Outcome:
    if outcome.worker is None:
        return outcome
    return replace(outcome, worker=names.get(outcome.worker, outcome.worker))
