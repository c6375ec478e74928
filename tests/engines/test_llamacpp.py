"""Tests of the router with real llama.cpp servers, which publish no KV events, so that the router
estimates their caches.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from tests.engines.answered import answer_of, base_requests
from tests.engines.pool import Pool
from tests.engines.streamed import stream
from tests.engines.traffic import words
from tests.engines.vllm_server import MODEL
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 60
STREAMS = 4
TOKENS = 1200


async def test_a_server_is_recognized_as_a_server_without_events(llamacpp: Pool) -> None:
    for row in await llamacpp.router.rows():
        assert (row["kind"], row["state"], row["models"]) == ("openai", "ready", [MODEL])
        assert (row["events"], row["events_from"], row["kv_used_tokens"]) == (None, None, None)


async def test_routed_answers_equal_the_servers(llamacpp: Pool) -> None:
    """The router's answers at temperature 0, one at a time, equal the server's except for ids,
    times and cached tokens.
    """
    for path, body in base_requests(seed=5, count=24):
        body = {k: v for k, v in body.items() if k != "tools"}
        body |= {"temperature": 0, "max_tokens": 8}
        for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            routed = await answer_of(llamacpp.router.url, path, body | extra)
            direct = await answer_of(llamacpp.servers[0].url, path, body | extra)
            assert routed == direct
            assert routed[0] == 200, routed


async def test_a_conversation_stays_at_the_server_that_has_its_prefix(llamacpp: Pool) -> None:
    """The router expects the prompts that it sent to a server to be cached there, and the server
    finds them in its cache.
    """
    told = []
    for turn in range(REQUESTS):
        said = words(random.Random(turn % 2), 200 + turn)
        body = {"model": MODEL, "prompt": said, "max_tokens": 1, "temperature": 0}
        status, answer = await llamacpp.ask("/v1/completions", body)
        assert status == 200, answer
        told.append(answer["usage"]["prompt_tokens"])

    async def counted() -> bool:
        lines = llamacpp.logged()[-REQUESTS:]
        return [line["prompt_tokens"] for line in lines] == told

    await until(counted, "the access log to count tokens as the server does")
    lines = llamacpp.logged()[-REQUESTS:]
    prompts = sum(line["prompt_tokens"] for line in lines)
    cached = sum(line["cached_tokens"] for line in lines)
    expected = sum(line["expected_hit_tokens"] for line in lines)
    print(f"\n{prompts} tokens of prompts: {cached} were cached, {expected} expected")
    assert cached > 0.8 * prompts
    assert 0.5 * cached < expected <= cached  # the mirror counts whole blocks


async def test_streams_survive_kill_9_and_the_server_comes_back(llamacpp: Pool) -> None:
    streams = [asyncio.create_task(stream(llamacpp, n, TOKENS)) for n in range(STREAMS)]

    async def under_way() -> bool:
        rows = await llamacpp.router.rows()
        return all(row["context_tokens"] for row in rows)

    await until(under_way, "streams at both servers")
    victim = llamacpp.servers[0]
    await victim.kill()
    try:
        # Its answers have no token ids, so a stream cannot continue elsewhere: it breaks off.
        ended = await asyncio.gather(*streams, return_exceptions=True)
        broken = [one for one in ended if isinstance(one, aiohttp.ClientPayloadError)]
        assert [one for one in ended if one not in broken] == [(["length"], TOKENS)] * (
            STREAMS - len(broken)
        )
        assert 0 < len(broken) < STREAMS
        await llamacpp.router.until_state(0, "down")
        for path, body in base_requests(seed=50, count=9):
            if "tools" not in body:
                assert (await llamacpp.ask(path, body))[0] == 200
    finally:
        await victim.start()
        await victim.until_healthy()
    await llamacpp.router.until_state(0, "ready")
    assert (await llamacpp.router.row(0))["resident_blocks"] == 0
