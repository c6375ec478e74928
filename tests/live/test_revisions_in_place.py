"""Tests of a process that is replaced by another version behind its URL without a failed probe: no
request uses KV of another version.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from pathlib import Path

from tests.effort import QUICK
from tests.live.stack import MODEL, Stack, running
from tests.live.swapped_engine import SwappedEngine

ROLES = ("prefill", "prefill", "decode", "decode")
CLIENTS = 16


async def ask(stack: Stack, serial: int) -> int:
    prompt = f"prompt {serial} " * 20
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16}
    headers = {"x-session-id": f"s{serial % 50}"}
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status


async def test_no_request_is_split_between_versions_while_they_change_in_place(
    tmp_path: Path,
) -> None:
    pairs: list[tuple[str, str]] = []
    statuses: list[int] = []
    rounds, draw = (4 if QUICK else 40), random.Random(3)
    flags = ["--disaggregation", "always"]
    async with AsyncExitStack() as exits:
        engines = [
            await exits.enter_async_context(SwappedEngine(pairs).serving("v0")) for _ in ROLES
        ]
        stack = await exits.enter_async_context(running(tmp_path / "logs", 0, flags))
        for engine, role in zip(engines, ROLES, strict=True):
            await stack.add(f"{engine.url},kind=vllm,events=none,role={role},group=g")
        serials, over = itertools.count(), asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                statuses.append(await ask(stack, next(serials)))

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        await asyncio.sleep(0.5)
        for number in range(1, rounds + 1):
            for engine in draw.sample(engines, len(engines)):
                await engine.swap(f"v{number}")
                await asyncio.sleep(draw.uniform(0.1, 0.5))
        over.set()
        await asyncio.gather(*clients)
        await stack.assert_idle()
    crossed = [pair for pair in pairs if pair[0] != pair[1]]
    asked = sum(engine.asked for engine in engines)
    print(f"\n{len(statuses)} requests, {len(pairs)} pairs, {len(crossed)} crossed, {asked} asked")
    assert len(pairs) > 20 * rounds
    assert crossed == []
    assert set(statuses) == {200}
