"""Live tests of a canary between a model's revisions: shares of sessions, workers that leave,
failures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.live.api_engine import ApiEngine, api_engine
from tests.live.stack import MODEL, Stack, misbehaving, running

SESSIONS = 200
BROKEN = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"
EMBED = "/v1/embeddings"


async def sessions_by_engine(
    stack: Stack, engines: list[ApiEngine], asked: str = "chat"
) -> list[list[str]]:
    """Send one request for each session; return for each engine the sessions that it got."""
    for engine in engines:
        engine.asked.clear()
    bodies = [{"model": asked, "input": "a", "session_id": f"s{n}"} for n in range(SESSIONS)]
    for at in range(0, SESSIONS, 20):
        asked_now = [stack.post(json.dumps(body).encode(), EMBED) for body in bodies[at : at + 20]]
        answers = await asyncio.gather(*asked_now)
        assert {(status, body["model"]) for status, body in answers} == {(200, asked)}
    found = [[json.loads(raw) for _, raw, _ in engine.asked] for engine in engines]
    assert {body["model"] for bodies in found for body in bodies} <= {MODEL}
    return [sorted(body["session_id"] for body in bodies) for bodies in found]


@asynccontextmanager
async def two_revisions(folder: Path) -> AsyncIterator[tuple[Stack, list[ApiEngine], list[int]]]:
    flags = ["--names-targets", f"chat={MODEL}@v1:80,{MODEL}@v2:20"]
    flags += ["--names-missing-model", "refuse"]
    flags += ["--retries-budget-per-s", "1000", "--ejection-failures", "1000"]
    async with (
        running(folder, 0, flags) as stack,
        api_engine(MODEL, EMBED) as first,
        api_engine(MODEL, EMBED) as second,
    ):
        ids = [await stack.add(f"{first.url},revision=v1")]
        ids.append(await stack.add(f"{second.url},revision=v2"))
        yield stack, [first, second], ids


async def test_a_canary_gets_its_share_of_sessions_until_it_is_removed(tmp_path: Path) -> None:
    async with two_revisions(tmp_path) as (stack, engines, ids):
        first = await sessions_by_engine(stack, engines)
        assert 20 <= len(first[1]) <= 60
        assert len(first[0]) + len(first[1]) == SESSIONS
        assert await sessions_by_engine(stack, engines) == first  # no session changes its revision
        await stack.remove(ids[1])
        alone = await sessions_by_engine(stack, engines)
        assert (len(alone[0]), alone[1]) == (SESSIONS, [])
        ids[1] = await stack.add(f"{engines[1].url},revision=v2")
        assert await sessions_by_engine(stack, engines) == first
        status, answer = await stack.post(b'{"input":"a"}', EMBED)
        assert (status, answer["error"]["code"]) == (400, "missing_model")


async def test_requests_that_fail_at_the_canary_move_to_the_other_revision(tmp_path: Path) -> None:
    async with two_revisions(tmp_path) as (stack, engines, ids):
        first = await sessions_by_engine(stack, engines)
        await stack.remove(ids[1])
        async with misbehaving(BROKEN, MODEL) as (url, broken):
            await stack.add(f"{url},revision=v2")
            after = await sessions_by_engine(stack, engines)
            assert len(after[0]) == SESSIONS
            assert set(first[0]) <= set(after[0])
            assert broken
            expected = {"ok": len(first[1]), "elsewhere": 0, "failed": len(broken)}
            labels = f'{{model="{MODEL}",result="%s",revision="v2",rule="chat"}}'
            counts = {
                result: await stack.metric("warmroute_name_requests_total" + labels % result)
                for result in expected
            }
            assert counts == expected
