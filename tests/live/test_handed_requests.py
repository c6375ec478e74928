"""Tests that a hot restart cuts no stream, and that the new router charges workers for the old
router's requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from simulator.live.processes import Program, Programs
from tests.live.handed_over import Routers
from tests.live.light_engine import LightEngine
from tests.live.stack import MODEL, Stack, engine_arguments, until

SHUTDOWN_S = 0.3
FLAGS = ("--timeouts-shutdown-s", str(SHUTDOWN_S))
STREAMS = 5
TOKENS = 6_000  # of a real engine: about a minute; the clients leave before its end


class PatientEngine(LightEngine):
    """An engine whose streams run until the test ends them, and which reports no load."""

    def __init__(self) -> None:
        super().__init__()
        self.end = asyncio.Event()

    async def _complete(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        if not body.get("stream"):
            return await super()._complete(request)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        while not self.end.is_set():
            await reply.write(_event("a ", None))
            await asyncio.sleep(0.05)
        await reply.write(_event("", "stop") + b"data: [DONE]\n\n")
        return reply


def _event(text: str, reason: str | None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode()


class Ground:
    """The engines, and the routers that replace one another. Lifetime: test."""

    def __init__(self, routers: Routers, http: aiohttp.ClientSession) -> None:
        self.routers = routers
        self.http = http
        self.engines = [PatientEngine(), PatientEngine()]

    def stack(self, router: Program) -> Stack:
        return Stack(self.routers.programs, router, [], self.http)

    async def start(self, name: str, *flags: str) -> Stack:
        """Start the next router and wait until its workers are ready."""
        workers = [part for one in self.engines for part in ("--worker", f"{one.url},kind=openai")]
        stack = self.stack(await self.routers.start(name, *workers, *FLAGS, *flags))
        for worker_id in range(len(self.engines)):
            await stack.until_state(worker_id, "ready")
        return stack

    def end_streams(self) -> None:
        for engine in self.engines:
            engine.end.set()


@asynccontextmanager
async def ground(folder: Path) -> AsyncIterator[Ground]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        one = Ground(Routers(programs, folder, []), http)
        for engine in one.engines:
            await engine.start()
        try:
            yield one
        finally:
            one.end_streams()
            for engine in one.engines:
                await engine.stop()


async def stream(stack: Stack, number: int, **fields: Any) -> float:
    """Read a stream to its end; return the seconds that it took, or -1 if it was cut."""
    began_s = time.monotonic()
    body = {"model": MODEL, "prompt": [number] * 40, "stream": True} | fields
    try:
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            data = await reply.read()
    except (aiohttp.ClientError, OSError):
        return -1.0
    return time.monotonic() - began_s if data.endswith(b"data: [DONE]\n\n") else -1.0


Streams = list[asyncio.Task[float]]


async def streams_at(stack: Stack, numbers: Sequence[int], charged: int, **fields: Any) -> Streams:
    """Start streams; wait until the router charges its workers with `charged` requests."""
    tasks = [asyncio.create_task(stream(stack, number, **fields)) for number in numbers]
    await until_charged(stack, charged)
    return tasks


async def until_charged(stack: Stack, count: int) -> None:
    async def reached() -> bool:
        return sum(row.get("inflight_requests", 0) for row in await stack.rows()) == count

    await until(reached, f"{count} requests at workers", 60)


async def requests_by_url(stack: Stack) -> dict[str, int]:
    return {row["url"]: row["inflight_requests"] for row in await stack.rows()}


async def ends(stack: Stack) -> None:
    """Wait until the router exits by itself with status 0."""
    assert await asyncio.wait_for(stack.router.process.wait(), 40) == 0


async def test_streams_continue_and_are_charged_at_the_new_router(tmp_path: Path) -> None:
    async with ground(tmp_path) as one:
        before = await one.start("before")
        streams = await streams_at(before, range(STREAMS), STREAMS)
        rows = await requests_by_url(before)
        after = await one.start("after")
        assert await requests_by_url(after) == rows, "all is known as soon as it serves"
        assert await after.metric("warmroute_former_requests") == STREAMS
        assert await after.metric("warmroute_former_routers") == 1
        own = await streams_at(after, [77], STREAMS + 1)
        await asyncio.sleep(10 * SHUTDOWN_S)  # the test asserts that nothing happens meanwhile
        assert not any(task.done() for task in (*streams, *own))
        one.end_streams()
        assert min(await asyncio.gather(*streams)) > 10 * SHUTDOWN_S
        await asyncio.gather(*own)
        await until_charged(after, 0)
        await ends(before)
        assert await after.metric("warmroute_former_routers") == 0
        assert (await after.complete([1, 2]))[0] == 200
        await after.assert_idle()


async def test_the_load_that_workers_report_is_not_counted_twice(tmp_path: Path) -> None:
    async with Programs(tmp_path) as programs, aiohttp.ClientSession() as http:
        workers = [await programs.start("w", "engine", engine_arguments(speed=1))]
        routers = Routers(programs, tmp_path, workers)
        before = Stack(programs, await routers.start("before", *FLAGS), workers, http)
        await before.until_state(0, "ready")
        streams = await streams_at(before, range(STREAMS), STREAMS, max_tokens=TOKENS)
        after = Stack(programs, await routers.start("after", *FLAGS), workers, http)
        for _ in range(20):
            row = await after.row(0)
            foreign = await after.metric("warmroute_worker_foreign_requests")
            assert (row["inflight_requests"], foreign) == (STREAMS, 0)
            await asyncio.sleep(0.05)
        assert not any(task.done() for task in streams)
        for task in streams:
            task.cancel()
        await until_charged(after, 0)
        await ends(before)
        await after.assert_idle()


async def test_stopping_the_old_router_gives_its_streams_shutdown_s(tmp_path: Path) -> None:
    async with ground(tmp_path) as one:
        before = await one.start("before")
        streams = await streams_at(before, range(STREAMS), STREAMS)
        after = await one.start("after")
        await until_charged(after, STREAMS)
        before.router.process.send_signal(signal.SIGTERM)
        await ends(before)
        await until_charged(after, 0)
        assert set(await asyncio.gather(*streams)) == {-1.0}
        await after.assert_idle()


async def test_streams_of_the_old_router_end_after_handover_s(tmp_path: Path) -> None:
    async with ground(tmp_path) as one:
        flags = ("--timeouts-handover-s", "0.5")
        before = await one.start("before", *flags)
        streams = await streams_at(before, range(STREAMS), STREAMS)
        after = await one.start("after", *flags)
        await ends(before)
        assert "timeouts.handover_s is over with 5 connections" in before.router.log.read_text()
        await until_charged(after, 0)
        assert set(await asyncio.gather(*streams)) == {-1.0}


async def test_killing_the_old_router_removes_its_charges(tmp_path: Path) -> None:
    async with ground(tmp_path) as one:
        before = await one.start("before")
        streams = await streams_at(before, range(STREAMS), STREAMS)
        after = await one.start("after")
        await until_charged(after, STREAMS)
        before.router.process.kill()
        await before.router.process.wait()
        await until_charged(after, 0)
        assert set(await asyncio.gather(*streams)) == {-1.0}
        await after.assert_idle()


@pytest.mark.parametrize("killed", [False, True])
async def test_a_third_router_charges_the_requests_of_both_older_routers(
    tmp_path: Path, killed: bool
) -> None:
    """A third router charges the requests of both routers before it, even if the second one dies at
    once, because the first one reports to it directly.
    """
    async with ground(tmp_path) as one:
        first = await one.start("first")
        streams = await streams_at(first, range(STREAMS), STREAMS)
        second = await one.start("second")
        more = await streams_at(second, range(10, 10 + STREAMS), 2 * STREAMS)
        third = await one.start("third")
        await until_charged(third, 2 * STREAMS)
        assert await third.metric("warmroute_former_routers") == 2
        if killed:
            second.router.process.kill()
            await until_charged(third, STREAMS)
            assert set(await asyncio.gather(*more)) == {-1.0}
        one.end_streams()
        assert min(await asyncio.gather(*streams)) > 0
        if not killed:
            assert min(await asyncio.gather(*more)) > 0
            await ends(second)
        await ends(first)
        await until_charged(third, 0)
        assert await third.metric("warmroute_former_routers") == 0
        await third.assert_idle()


async def test_a_new_router_that_fails_to_start_leaves_the_old_one_and_its_streams(
    tmp_path: Path,
) -> None:
    async with ground(tmp_path) as one:
        before = await one.start("before")
        streams = await streams_at(before, range(STREAMS), STREAMS)
        taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = str(taken.sockets[0].getsockname()[1])
        with pytest.raises(RuntimeError, match=r"cannot listen on 127\.0\.0\.1"):
            await one.routers.start("broken", "--port", port, *FLAGS)
        taken.close()
        assert (await before.complete([1, 2]))[0] == 200
        after = await one.start("after")
        await until_charged(after, STREAMS)
        one.end_streams()
        assert min(await asyncio.gather(*streams)) > 0
        await until_charged(after, 0)
        await ends(before)
