"""Tests of a pool in which one of four workers fails every request at once: its low load must not
attract requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.live.failing_engine import ADAPTER, MODEL, WAYS, FailingEngine, Way, engine
from tests.live.stack import Stack, running

# Until the bad worker's first refusal is known, each client may send a request there. The load is
# long enough that these few requests are well below `MOST_SHARE` of it.
CLIENTS, REQUESTS = 8, 600
MOST_ERRORS, MOST_SHARE = 0.01, 0.03
PREFIX_TOKENS, PROMPT_TOKENS = 512, 640
TABLE = list(itertools.product(WAYS, ("hybrid", "warmset"), (True, False), (True, False)))
# CI takes each way once: warm with one policy and cold with the other in turn, some of them
# streamed and some whole.
# test_busy_workers.py tests refusals by 429 and 529 in the same kind of pool.
QUICK = {
    (way, ("hybrid", "warmset")[n % 2], n % 2 == 0, n // 2 % 2 == 1)
    for n, way in enumerate(WAYS)
    if way not in ("status_429", "status_529")
}


def _case(*case: Any) -> Any:
    way, policy, warm, streams = case
    name = f"{way}-{policy}-{'warm' if warm else 'cold'}-{'streamed' if streams else 'whole'}"
    marks = () if case in QUICK else (pytest.mark.full,)
    return pytest.param(*case, id=name, marks=marks)


async def _content(stack: Stack, prompt: list[int], model: str, streams: bool) -> bool:
    """Send a completion; return whether its answer is complete and has text."""
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "stream": streams}
    try:
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            said = await reply.read()
    except aiohttp.ClientError:  # the stream was cut
        return False
    if reply.status != 200:
        return False
    if not streams:
        return b'"text": "word"' in said
    return b'"text": "word"' in said and said.endswith(b"data: [DONE]\n\n")


async def _load(stack: Stack, warm: bool, model: str, streams: bool) -> int:
    """Send `REQUESTS` requests; return how many got no complete answer."""
    rng, failed = random.Random(0), 0
    left = iter(range(REQUESTS))

    async def client() -> None:
        nonlocal failed
        for _ in left:
            shared = [7] * PREFIX_TOKENS if warm else []
            own = [rng.randrange(1, 30_000) for _ in range(PROMPT_TOKENS - len(shared))]
            answered = await _content(stack, shared + own, model, streams)
            failed += not answered

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return failed


@pytest.mark.parametrize(("way", "policy", "warm", "streams"), [_case(*case) for case in TABLE])
async def test_a_worker_that_fails_at_once_gets_few_requests_and_causes_few_errors(
    tmp_path: Path, way: Way, policy: str, warm: bool, streams: bool
) -> None:
    model = ADAPTER if way == "no_adapter" else MODEL
    async with (
        running(tmp_path, workers=0, router=["--policy", policy]) as stack,
        AsyncExitStack() as engines,
    ):
        bad: FailingEngine = await engines.enter_async_context(engine())
        bad_id = await stack.add(bad.url)
        for _ in range(2):  # it alone has the prefix, if there is one
            assert await _content(stack, [7] * PROMPT_TOKENS, model, streams)
        for _ in range(3):
            await stack.add((await engines.enter_async_context(engine())).url)
        bad.way, bad.asked = way, 0
        failed = await _load(stack, warm, model, streams)
        print(f"errors {failed} of {REQUESTS}, asked of the bad worker {bad.asked}")
        print(await stack.row(bad_id))
        assert failed < MOST_ERRORS * REQUESTS
        assert bad.asked < MOST_SHARE * REQUESTS
        await stack.assert_idle()
