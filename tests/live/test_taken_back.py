"""Tests of a worker that is removed and added again while its streams run: the router counts it as
one worker with the right load.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from simulator.live.processes import Program
from tests.live.stack import MODEL, Stack, engine_arguments, running, until

STREAMS = 3
TOKENS = 400


async def stream(stack: Stack, number: int) -> bool:
    """Read a long stream; return whether it came whole."""
    body = {"model": MODEL, "prompt": [number] * 40, "max_tokens": TOKENS, "stream": True}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
        data = await reply.read()
    return data.endswith(b"data: [DONE]\n\n") and data.count(b"data: ") >= TOKENS


async def until_streaming(stack: Stack, worker_id: int) -> None:
    async def reached() -> bool:
        return bool((await stack.row(worker_id))["inflight_requests"] == STREAMS)

    await until(reached, f"{STREAMS} streams at worker {worker_id}")


async def remove(stack: Stack, worker_id: int) -> None:
    async with stack.http.delete(f"{stack.admin}/workers/{worker_id}") as reply:
        assert reply.status == 202


MORE = "", ",weight=2,max_requests=8", ",kv_tokens=9000"
# One worker reports its load, and one does not; CI takes each option once.
CASES = [
    pytest.param(kind, more, marks=pytest.mark.full if (n + m) % 2 else ())
    for n, kind in enumerate(("vllm", "openai"))
    for m, more in enumerate(MORE)
]


@pytest.mark.parametrize(("kind", "more"), CASES)
async def test_a_worker_that_is_removed_and_added_again_keeps_its_streams(
    tmp_path: Path, kind: str, more: str
) -> None:
    async with running(tmp_path, workers=0) as stack:
        engine: Program = await stack.programs.start("w", "engine", engine_arguments(speed=2))
        spec = f"{engine.url},kind={kind}"
        worker_id = await stack.add(spec)
        streams = [asyncio.ensure_future(stream(stack, n)) for n in range(STREAMS)]
        await until_streaming(stack, worker_id)
        for again in (more, "", more):
            await remove(stack, worker_id)
            await remove(stack, worker_id)
            assert await stack.add(spec + again) == worker_id
            (row,) = await stack.rows()
            assert (row["state"], row["leaving"]) == ("ready", False)
            assert row["inflight_requests"] == STREAMS
            async with stack.http.post(f"{stack.admin}/workers", json=spec) as reply:
                assert reply.status == 409
        assert not any(one.done() for one in streams), "the load is too short to show anything"
        assert await asyncio.gather(*streams) == [True] * STREAMS
        assert (await stack.complete([1, 2]))[0] == 200
        await stack.assert_idle()


async def test_a_worker_removed_by_force_and_added_again_starts_without_requests(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=0) as stack:
        engine = await stack.programs.start("w", "engine", engine_arguments(speed=1))
        worker_id = await stack.add(f"{engine.url},kind=openai")
        streams = [asyncio.ensure_future(stream(stack, n)) for n in range(STREAMS)]
        await until_streaming(stack, worker_id)
        await remove(stack, worker_id)
        await stack.remove(worker_id)
        other = await stack.add(f"{engine.url},kind=openai")
        assert other != worker_id
        (row,) = await stack.rows()
        assert row["inflight_requests"] == 0
        await asyncio.gather(*streams, return_exceptions=True)
        await stack.assert_idle()
