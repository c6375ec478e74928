"""Tests of the router's view of a real vLLM that refuses, evicts, resets, sleeps, pauses or is
unreachable.

The engine publishes that its cache was emptied only with its next step: these tests are about the
view before that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.engines.heard import BLOCKS, hit_blocks, prompt, until_events_resume, warmed
from tests.engines.pool import Pool
from tests.engines.vllm_server import BLOCKS as SERVER_BLOCKS
from tests.engines.vllm_server import MODEL, Server
from tests.live.stack import Stack, until
from tests.told_decision import EXPLAIN, decision_in

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until_hits(stack: Stack, tokens: list[int], worker: int, blocks: int) -> None:
    async def reached() -> bool:
        return (await hit_blocks(stack, tokens))[worker] == blocks

    await until(reached, f"{blocks} blocks believed of worker {worker}")


async def until_trouble(stack: Stack, worker: int, text: str) -> None:
    async def troubled() -> bool:
        return text in ((await stack.row(worker))["trouble"] or "")

    await until(troubled, f"worker {worker} to be in trouble: {text}")


async def until_back(stack: Stack, worker: int) -> None:
    """Wait until the worker is ready and the router has asked its event publisher for a replay."""
    await stack.until_state(worker, "ready")

    async def replayed() -> bool:
        async with stack.http.get(f"{stack.admin}/metrics") as reply:
            text = await reply.text()
        pattern = rf'kv_events_total{{kind="replays",worker="{worker}"}} (\S+)'
        return any(float(count) >= 1 for count in re.findall(pattern, text))

    await until(replayed, f"a replay of worker {worker}")


async def test_a_refused_request_leaves_no_charge_and_no_expected_hits(vllm: Pool) -> None:
    tokens = prompt(1)
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": -1}
    status, answer = await vllm.ask("/v1/completions", body)
    assert status == 400, answer
    await vllm.router.assert_idle()  # the router may see the end after the client
    assert await hit_blocks(vllm.router, tokens) == [0, 0]


async def test_evicted_blocks_are_not_expected(vllm: Pool) -> None:
    """The router does not expect evicted blocks: right after other prompts have filled the cache,
    long before an expectation expires.
    """
    first = prompt(2)
    body = {"model": MODEL, "prompt": first, "max_tokens": 1}
    assert (await vllm.ask("/v1/completions", body))[0] == 200
    many = SERVER_BLOCKS // BLOCKS + 2
    for worker in range(2):
        for n in range(many):
            other = {**body, "prompt": prompt(100 + worker * many + n)}
            assert (await vllm.servers[worker].post("/v1/completions", other))[0] == 200
    await vllm.until_true()
    assert await hit_blocks(vllm.router, first) == [0, 0]


async def test_a_reset_of_an_idle_server_is_known_before_the_next_step(vllm: Pool) -> None:
    tokens = await warmed(vllm, 3, 0)
    status, answer = await vllm.servers[0].post("/reset_prefix_cache")
    assert status == 200, answer
    await until_hits(vllm.router, tokens, 0, 0)
    assert (await vllm.router.row(0))["resident_blocks"] == 0
    await warmed(vllm, 4, 0)

    async def known() -> bool:
        return bool((await vllm.router.row(0))["kv_known"])

    await until(known, "the clear that came with the next step")
    await vllm.until_true()


@asynccontextmanager
async def put_away(server: Server, down: str, up: str) -> AsyncIterator[None]:
    """Put the server to sleep or pause it during the block; `down` and `up` are the paths
    to call.
    """
    status, answer = await server.post(down)
    try:
        assert status == 200, f"POST {down} answered {status}: {answer}"
        yield
    finally:
        assert (await server.post(up))[0] == 200


async def test_a_paused_server_gets_no_requests_until_resumed(vllm: Pool) -> None:
    tokens = await warmed(vllm, 5, 0)
    async with put_away(vllm.servers[0], "/pause", "/resume"):
        await until_trouble(vllm.router, 0, "paused")
        await vllm.router.until_state(0, "down")
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
        answers = await asyncio.gather(*(vllm.ask("/v1/completions", body) for _ in range(4)))
        assert [status for status, _ in answers] == [200] * 4
    await until_back(vllm.router, 0)
    assert (await hit_blocks(vllm.router, tokens))[0] == 0
    await warmed(vllm, 6, 0)
    await vllm.until_true()


@pytest.mark.parametrize("level", [0, 1])
async def test_the_cache_of_a_server_that_slept_is_empty(vllm: Pool, level: int) -> None:
    """The router treats the cache of a server that slept as empty; level 0 keeps the cache, but no
    event shows that, so the index is a lower bound.
    """
    tokens = await warmed(vllm, 7 + level, 0)
    async with put_away(vllm.servers[0], f"/sleep?level={level}", "/wake_up"):
        await vllm.router.until_state(0, "down")
    await until_back(vllm.router, 0)
    assert (await hit_blocks(vllm.router, tokens))[0] == 0
    if not level:  # so that everything is known again
        assert (await vllm.servers[0].post("/reset_prefix_cache"))[0] == 200
    await warmed(vllm, 9 + level, 0)
    await vllm.until_true()


async def test_a_lost_event_connection_is_shown_and_recovers(vllm: Pool) -> None:
    await until_events_resume(vllm)


async def test_a_repeated_prompt_has_exact_hits_and_a_header_with_the_reason(vllm: Pool) -> None:
    """The second request for a prompt goes to the worker that holds it, and a header of the answer
    says why and that its hits are exact.
    """

    async def exact() -> bool:
        return [row["hits"]["mode"] for row in await vllm.router.rows()] == ["exact"] * 2

    await until(exact, "the workers to be exact")
    tokens = prompt(40)
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    url, headers = f"{vllm.router.url}/v1/completions", {EXPLAIN: "1"}
    told = []
    for _ in range(2):
        async with vllm.router.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            told.append(reply.headers[EXPLAIN])
    first, second = map(decision_in, told)
    assert second["worker"] == first["worker"]
    assert second["hits"] == {"mode": "exact", "cause": None, "reason": None, "lift": None}
    size = (await vllm.router.row(second["worker"]))["block_size"]
    held, of = second["expected_hit_tokens"] // size, -(-second["prompt_tokens"] // size)
    assert held > 0
    assert told[1].startswith(f"worker {second['worker']} holds {held} of {of} blocks; worker ")
