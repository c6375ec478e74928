"""Tests of steps that fail: the answer that each request gets, and when the worker ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from engine.runner.runner import MAX_FAILED_STEPS, EngineFailed
from tests.engine.real import COMPLETIONS, Reference, computing, greedy, ids_of
from tests.engine.runner.failing import breaking
from tests.oracles.block_pool import check_pool

PROMPT = list(range(30, 60))


@pytest.mark.parametrize("kind", ["fails", "nan"])
async def test_clients_of_a_failed_step_get_500_and_the_engine_continues(
    folder: Path, reference: Reference, kind: str
) -> None:
    async with computing(
        breaking(folder, **{"fails": set(), "nan": set()} | {kind: {2}})
    ) as worker:
        status, answer = await worker.post(COMPLETIONS, greedy(PROMPT, 9))
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert await ids_of(worker, greedy(PROMPT, 9)) == reference.greedy(PROMPT, 9)
        scheduler = worker.worker.runner.scheduler
        assert (scheduler.kv_used_blocks, worker.worker.unfinished) == (0, 0)
        check_pool(scheduler.pool)


async def test_a_stream_whose_step_fails_has_an_error_event_and_is_cut(folder: Path) -> None:
    async with computing(breaking(folder, {3})) as worker:
        body = greedy(PROMPT, 9, stream=True)
        async with worker.http.post(worker.url + COMPLETIONS, json=body) as reply:
            assert reply.status == 200
            lines: list[bytes] = []

            async def read() -> None:
                while line := await reply.content.readline():
                    lines.append(line)

            with pytest.raises(aiohttp.ClientPayloadError):
                await read()
        events = [json.loads(one.removeprefix(b"data: ")) for one in lines if one.strip()]
        assert ["choices" in one for one in events] == [True, True, True, False]
        assert events[-1]["error"]["code"] == 500
        assert worker.worker.unfinished == 0


async def test_consecutive_failed_steps_end_the_worker(folder: Path) -> None:
    async def fail_all() -> None:
        async with computing(breaking(folder, set(range(100)))) as worker:
            for _ in range(MAX_FAILED_STEPS):
                await worker.post(COMPLETIONS, greedy(PROMPT, 9))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await fail_all()
    assert ended.value.subgroup(EngineFailed) is not None
