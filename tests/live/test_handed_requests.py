"""A hot restart cuts no stream; the new router charges what the old one still has at workers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulator.live.processes import Program
from tests.live.stack import MODEL, Stack, until
from tests.live.test_hot_restart import Routers, stage

SHUTDOWN_S = 0.3
FLAGS = ("--timeouts-shutdown-s", str(SHUTDOWN_S))
STREAMS = 5
TOKENS = 800  # about 8 s at speed 1
KINDS = ("vllm", "openai")  # which reports its load, and which does not


async def stream(stack: Stack, number: int, tokens: int = TOKENS) -> float:
    """Seconds that an answer took which came whole; below 0: it was cut."""
    began_s = time.monotonic()
    body = {"model": MODEL, "prompt": [number] * 40, "max_tokens": tokens, "stream": True}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
        data = await reply.read()
    whole = data.endswith(b"data: [DONE]\n\n") and data.count(b"data: ") >= tokens
    return time.monotonic() - began_s if whole else -1.0


async def started(routers: Routers, name: str, kind: str, *flags: str) -> Program:
    """A router whose workers are all of this kind."""
    workers = [part for one in routers.workers for part in ("--worker", f"{one.url},kind={kind}")]
    kept, routers.workers = routers.workers, []
    try:
        return await routers.start(name, *workers, *FLAGS, *flags)
    finally:
        routers.workers = kept


def stack_of(routers: Routers, router: Program, http: object) -> Stack:
    return Stack(routers.programs, router, routers.workers, http)  # type: ignore[arg-type]


async def charged(stack: Stack) -> int:
    return sum(row.get("inflight_requests", 0) for row in await stack.rows())


async def until_charged(stack: Stack, count: int) -> None:
    async def reached() -> bool:
        return await charged(stack) == count

    await until(reached, f"{count} requests at workers")


def streams_of(stack: Stack, numbers: Sequence[int]) -> list[asyncio.Task[float]]:
    return [asyncio.create_task(stream(stack, number)) for number in numbers]


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_run_on_and_are_charged_at_the_new_router(tmp_path: Path, kind: str) -> None:
    async with stage(tmp_path, speed=1) as (routers, http):
        before = stack_of(routers, await started(routers, "before", kind), http)
        await before.until_state(0, "ready")
        await before.until_state(1, "ready")
        streams = streams_of(before, range(STREAMS))
        await until_charged(before, STREAMS)
        rows = {row["url"]: row["inflight_requests"] for row in await before.rows()}
        after = stack_of(routers, await started(routers, "after", kind), http)
        at_once = {row["url"]: row["inflight_requests"] for row in await after.rows()}
        assert at_once == rows, "all is known as soon as it serves"
        assert await after.metric("warmroute_former_requests") == STREAMS
        assert await after.metric("warmroute_former_routers") == 1
        if kind == "vllm":  # what is charged is not taken for others' load, too

            async def reported() -> bool:
                return all((row["load_age_s"] or 0) < 1 for row in await after.rows())

            await until(reported, "load reports")
            assert await after.metric("warmroute_worker_foreign_requests") == 0
        assert not any(one.done() for one in streams)
        seconds = await asyncio.gather(*streams)
        assert min(seconds) > 10 * SHUTDOWN_S
        await until_charged(after, 0)
        assert await asyncio.wait_for(before.router.process.wait(), 20) == 0
        assert await after.metric("warmroute_former_routers") == 0
        assert (await after.complete([1, 2]))[0] == 200
        await after.assert_idle()


async def test_a_stop_of_the_router_before_gives_its_streams_shutdown_s(tmp_path: Path) -> None:
    async with stage(tmp_path, speed=1) as (routers, http):
        before = stack_of(routers, await started(routers, "before", "openai"), http)
        await before.until_state(0, "ready")
        streams = streams_of(before, range(STREAMS))
        await until_charged(before, STREAMS)
        after = stack_of(routers, await started(routers, "after", "openai"), http)
        await until_charged(after, STREAMS)
        before.router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(before.router.process.wait(), 20) == 0
        await until_charged(after, 0)
        await asyncio.gather(*streams, return_exceptions=True)
        await after.assert_idle()


async def test_what_handover_s_allows_is_all_that_streams_get(tmp_path: Path) -> None:
    async with stage(tmp_path, speed=1) as (routers, http):
        flags = ("--timeouts-handover-s", "0.5")
        before = stack_of(routers, await started(routers, "before", "openai", *flags), http)
        await before.until_state(0, "ready")
        streams = streams_of(before, range(STREAMS))
        await until_charged(before, STREAMS)
        after = stack_of(routers, await started(routers, "after", "openai", *flags), http)
        assert await asyncio.wait_for(before.router.process.wait(), 20) == 0
        assert "timeouts.handover_s is over with 5 connections" in before.router.log.read_text()
        await until_charged(after, 0)
        await asyncio.gather(*streams, return_exceptions=True)
        await after.assert_idle()


async def test_a_router_before_that_is_killed_takes_its_charges_along(tmp_path: Path) -> None:
    async with stage(tmp_path, speed=1) as (routers, http):
        before = stack_of(routers, await started(routers, "before", "openai"), http)
        await before.until_state(0, "ready")
        streams = streams_of(before, range(STREAMS))
        await until_charged(before, STREAMS)
        after = stack_of(routers, await started(routers, "after", "openai"), http)
        await until_charged(after, STREAMS)
        before.router.process.kill()
        await before.router.process.wait()
        await until_charged(after, 0)
        await asyncio.gather(*streams, return_exceptions=True)
        await after.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed", [False, True])
async def test_the_third_router_charges_what_both_before_it_have(
    tmp_path: Path, kind: str, killed: bool
) -> None:
    """Also if the second one dies at once: the third hears the first by itself."""
    async with stage(tmp_path, speed=1) as (routers, http):
        first = stack_of(routers, await started(routers, "first", kind), http)
        await first.until_state(0, "ready")
        streams = streams_of(first, range(STREAMS))
        await until_charged(first, STREAMS)
        second = stack_of(routers, await started(routers, "second", kind), http)
        more = streams_of(second, range(10, 10 + STREAMS))
        await until_charged(second, 2 * STREAMS)
        third = stack_of(routers, await started(routers, "third", kind), http)
        await until_charged(third, 2 * STREAMS)
        assert await third.metric("warmroute_former_routers") == 2
        left = STREAMS
        if killed:
            second.router.process.kill()
            await until_charged(third, left)
            await asyncio.gather(*more, return_exceptions=True)
        assert min(await asyncio.gather(*streams)) > 10 * SHUTDOWN_S
        if not killed:
            assert min(await asyncio.gather(*more)) > 10 * SHUTDOWN_S
            assert await asyncio.wait_for(second.router.process.wait(), 20) == 0
        assert await asyncio.wait_for(first.router.process.wait(), 20) == 0
        await until_charged(third, 0)
        assert await third.metric("warmroute_former_routers") == 0
        await third.assert_idle()


async def test_a_follower_that_fails_to_start_leaves_the_router_and_its_streams(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path, speed=1) as (routers, http):
        before = stack_of(routers, await started(routers, "before", "openai"), http)
        await before.until_state(0, "ready")
        streams = streams_of(before, range(STREAMS))
        await until_charged(before, STREAMS)
        taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = str(taken.sockets[0].getsockname()[1])
        flags = ("--port", port, *FLAGS)
        with pytest.raises(RuntimeError, match=r"cannot listen on 127\.0\.0\.1"):
            await routers.start("broken", *flags)
        taken.close()
        assert (await before.complete([1, 2]))[0] == 200
        after = stack_of(routers, await started(routers, "after", "openai"), http)
        await until_charged(after, STREAMS)
        assert min(await asyncio.gather(*streams)) > 10 * SHUTDOWN_S
        await until_charged(after, 0)
