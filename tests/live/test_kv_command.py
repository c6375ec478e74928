"""Tests of `warmroute kv`, which compares the router's view of a worker's blocks with the worker's
own.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.live.kv_commands import kv
from tests.live.kv_views import explained, until_resident
from tests.live.stack import engine_arguments, running, until


async def test_kv_reports_equal_missing_and_wrong_blocks(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, router=["--policy", "round_robin"]) as stack:
        held = {}
        for n in range(2):
            met = await explained(stack, [n * 10_000 + i for i in range(641 + 320 * n)])
            held[met["worker"]] = 40 + 20 * n
        for worker_id, blocks in held.items():
            await until_resident(stack, worker_id, blocks)
        status, said = await kv(stack, "--worker", "0", "--compare", stack.workers[0].url)
        assert status == 0, said
        assert f"equal {held[0]}, missing here 0, only here 0" in said
        assert re.search(r"worker 0 \(http://\S+\): known, next batch \d+, ", said)
        # Blocks of another worker do not belong to this one.
        status, said = await kv(stack, "--worker", "0", "--compare", stack.workers[1].url)
        assert status == 1, said
        assert f"equal 0, missing here {held[1]}, only here {held[0]}" in said
        assert (await kv(stack, "--worker", "1"))[0] == 0


async def test_kv_distinguishes_a_worker_without_events_from_an_unknown_cache(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=0) as stack:
        silent = await stack.programs.start("silent", "engine", engine_arguments())
        worker = f"{silent.url},events=none"
        async with stack.http.post(f"{stack.admin}/workers", json=worker) as reply:
            assert reply.status < 300, await reply.text()
        await stack.until_state(0, "ready")
        status, said = await kv(stack, "--worker", "0")
        assert (status, "no KV events, mirrored" in said) == (0, True), said


async def test_kv_reports_an_invalid_worker_or_address_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        for arguments, says in (
            (["--worker", "7"], "there is no worker '7'; ids: 0"),
            (["--worker", "0", "--compare", "http://127.0.0.1:9"], "GET http://127.0.0.1:9/kv_sn"),
            (["--worker", "0", "--compare", stack.admin], "404"),
            (["--worker", "0", "--compare", f"{stack.admin}/kv?worker=0&x="], "snapshot"),
            (["--worker", "0", "--compare", "no address"], "no address"),
            (["--worker", "0", "--admin", stack.workers[0].url], "404"),
        ):
            status, said = await kv(stack, *arguments)
            assert (status, said.count("\n")) == (2, 1), said
            assert said.startswith("error: ")
            assert says in said
        # The router is gone.
        admin = stack.admin
        stack.router.process.terminate()
        await stack.router.process.wait()
        status, said = await kv(stack, "--worker", "0")
        assert (status, admin in said) == (2, True), said


async def test_kv_compares_both_sides_at_the_same_event_under_load(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        await explained(stack, list(range(641)))
        await until_resident(stack, 0, 40)
        stop = asyncio.Event()

        async def load() -> None:
            n = 0
            while not stop.is_set():
                n += 1
                await stack.complete([n] * 100, max_tokens=4)

        asking = asyncio.create_task(load())
        try:

            async def equal() -> bool:
                return (await kv(stack, "--worker", "0", "--compare", stack.workers[0].url))[0] == 0

            await until(equal, "both sides as of one batch")
        finally:
            stop.set()
            await asking
