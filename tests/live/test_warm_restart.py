"""Tests that a router knows its workers' caches again after it was stopped and restarted."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from simulator.live.processes import Program, Programs
from tests.live.kv_commands import kv
from tests.live.kv_views import explained, port_of, until_resident
from tests.live.stack import Stack, engine_arguments, until

BLOCKS = 20  # of 16 tokens, of each prompt
PROMPTS = [[n * 1_000 + i for i in range(16 * BLOCKS)] for n in range(8)]


@asynccontextmanager
async def engine_and_file(folder: Path) -> AsyncIterator[Stack]:
    """Yield one engine without snapshots, like vLLM, and a router that saves its view to a file."""
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        worker = await programs.start("worker", "engine", engine_arguments())
        router = await start_router(programs, folder, worker)
        stack = Stack(programs, router, [worker], http)
        await stack.until_state(0, "ready")
        yield stack


async def start_router(programs: Programs, folder: Path, worker: Program) -> Program:
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--kv-state", str(folder / "kv")]
    return await programs.start(
        "router", "router", [*arguments, "--worker", f"{worker.url},kind=vllm"]
    )


async def stop_router(stack: Stack) -> None:
    stack.router.process.send_signal(signal.SIGTERM)
    assert await stack.router.process.wait() == 0


async def restarted(stack: Stack, folder: Path) -> Stack:
    router = await start_router(stack.programs, folder, stack.workers[0])
    return Stack(stack.programs, router, stack.workers, stack.http)


async def warm(stack: Stack) -> None:
    """Send prompts until the worker holds them and the router knows it."""
    for prompt in PROMPTS:
        await explained(stack, [*prompt, 1])
    await until_resident(stack, 0, BLOCKS * len(PROMPTS))


async def until_known(stack: Stack) -> None:
    async def known() -> bool:
        rows = await stack.rows()
        return bool(rows and rows[0].get("kv_known"))

    await until(known, "the worker's cache to be known")


async def batches(stack: Stack) -> float:
    return await stack.metric('warmroute_kv_events_total{kind="batches",worker="0"}')


async def equal(stack: Stack) -> str:
    """Run `warmroute kv`, check that it finds the router's view equal to the engine's, and return
    its output.
    """
    status, said = await kv(stack, "--worker", "0", "--compare", stack.workers[0].url)
    assert status == 0, said
    return said


async def test_a_restarted_router_knows_the_caches_that_it_knew_before(tmp_path: Path) -> None:
    async with engine_and_file(tmp_path) as stack:
        await warm(stack)
        followed = await batches(stack)
        assert f"equal {BLOCKS * len(PROMPTS)}," in await equal(stack)
        await stop_router(stack)
        after = await restarted(stack, tmp_path)
        await until_known(after)
        assert f"equal {BLOCKS * len(PROMPTS)}," in await equal(after)
        # The router knows it from the saved file, not from a complete replay.
        assert await batches(after) <= 2 < followed
        assert await after.metric('warmroute_kv_events_total{kind="snapshots",worker="0"}') == 0
        met = await explained(after, [*PROMPTS[3], 2])
        assert met["expected"] == met["cached"] == 16 * BLOCKS
        await equal(after)


async def test_a_restarted_router_replays_the_events_that_it_missed(tmp_path: Path) -> None:
    async with engine_and_file(tmp_path) as stack:
        await warm(stack)
        await stop_router(stack)
        worker = stack.workers[0]
        for n in range(3):
            body = {"model": "tiny", "prompt": [20_000 + n, *range(320)], "max_tokens": 1}
            async with stack.http.post(f"{worker.url}/v1/completions", json=body) as reply:
                assert reply.status == 200
        after = await restarted(stack, tmp_path)
        await until_known(after)
        assert f"equal {BLOCKS * (len(PROMPTS) + 3)}," in await equal(after)


async def test_saved_state_of_an_engine_that_restarted_meanwhile_is_discarded(
    tmp_path: Path,
) -> None:
    for further in (0, 2 * len(PROMPTS)):  # it published less than the one before, or more
        folder = tmp_path / str(further)
        folder.mkdir()
        async with engine_and_file(folder) as stack:
            await warm(stack)
            await stop_router(stack)
            worker = stack.workers[0]
            worker.process.send_signal(signal.SIGKILL)
            await worker.process.wait()
            arguments = engine_arguments(port=port_of(worker.url))
            await stack.programs.start("again", "engine", arguments)
            for n in range(further):
                body = {"model": "tiny", "prompt": [20_000 + n, *range(320)], "max_tokens": 1}
                async with stack.http.post(f"{worker.url}/v1/completions", json=body) as reply:
                    assert reply.status == 200
            after = await restarted(stack, folder)
            await until_known(after)
            assert f"equal {BLOCKS * further}," in await equal(after)
            met = await explained(after, [*PROMPTS[0], 2])
            assert (met["expected"], met["cached"]) == (0, 0)


async def test_a_damaged_state_file_gives_a_warning_and_the_cache_is_learned_again(
    tmp_path: Path,
) -> None:
    async with engine_and_file(tmp_path) as stack:
        await warm(stack)
        await stop_router(stack)
        file = tmp_path / "kv"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        after = await restarted(stack, tmp_path)
        await until_known(after)
        await until_resident(after, 0, BLOCKS * len(PROMPTS))
        await equal(after)
        assert "caches are learned anew" in after.router.log.read_text()
