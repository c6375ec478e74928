"""Tests of the router with real vLLM: recognition of the engine, exact tokens and hits, and a
correct index.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.effort import QUICK
from tests.engines.compatibility import EXACT
from tests.engines.model import LORA
from tests.engines.pool import Pool
from tests.engines.traffic import requests, words
from tests.engines.vllm_server import BLOCK_SIZE, BLOCKS, MODEL
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PREDICTIONS = 300 if QUICK else 1000
EXACT_SHARE = 0.999


async def test_a_server_is_recognized_by_its_url(vllm: Pool) -> None:
    for row in await vllm.router.rows():
        assert (row["kind"], row["block_size"], row["state"]) == ("vllm", BLOCK_SIZE, "ready")
        # One block is vLLM's own.
        assert row["kv_capacity_tokens"] in (BLOCKS * BLOCK_SIZE, (BLOCKS - 1) * BLOCK_SIZE)
        assert row["events_from"] == "read here"
    async with vllm.router.http.get(f"{vllm.router.url}/v1/models") as reply:
        models = {row["id"] for row in (await reply.json())["data"]}
    assert models == {MODEL, LORA}


async def test_hits_and_index_equal_those_of_vllm(
    vllm: Pool, record_property: Callable[[str, object], None]
) -> None:
    """The router's expected hits equal vLLM's, and its index equals vLLM's own table, if requests
    are sent one at a time.
    """
    before = len(vllm.logged())
    for path, body in requests(seed=1, count=PREDICTIONS):
        status, answer = await vllm.ask(path, body)
        assert status == 200, answer

    async def written() -> bool:
        return len(vllm.logged()) >= before + PREDICTIONS

    await until(written, "all lines of the access log")
    lines = vllm.logged()[before:]
    assert all(line["status"] == 200 for line in lines)
    off = [line for line in lines if line["expected_hit_tokens"] != line["cached_tokens"]]
    shown = [(line["path"], line["expected_hit_tokens"], line["cached_tokens"]) for line in off]
    record_property(EXACT, f"{len(lines) - len(off)} of {len(lines)}")
    assert len(off) <= len(lines) * (1 - EXACT_SHARE), shown
    assert sum(line["cached_tokens"] for line in lines) > 0
    await vllm.until_true()


async def test_token_counts_equal_the_servers(vllm: Pool) -> None:
    draw = random.Random(2)
    asked = [(p, b) for p, b in requests(seed=3, count=80) if not isinstance(b.get("prompt"), list)]
    before = len(vllm.logged())
    told = []
    for path, body in asked:
        text = {k: body[k] for k in ("model", "prompt", "messages", "tools") if k in body}
        status, counted = await vllm.servers[draw.randrange(2)].post("/tokenize", text)
        assert status == 200, counted
        told.append(counted["count"])
        await vllm.ask(path, body)

    async def written() -> bool:
        return len(vllm.logged()) >= before + len(asked)

    await until(written, "all lines of the access log")
    assert [line["prompt_tokens"] for line in vllm.logged()[before:]] == told


async def test_the_index_is_right_after_concurrent_requests(vllm: Pool) -> None:
    async def client(number: int) -> None:
        for path, body in requests(seed=100 + number, count=25):
            status, answer = await vllm.ask(path, body)
            assert status == 200, answer

    await asyncio.gather(*(client(number) for number in range(8)))
    await vllm.until_true()
    assert (await vllm.view(0)).index_agrees
    await vllm.router.assert_idle()


async def test_a_reset_cache_is_known_to_be_empty_after_the_next_step(vllm: Pool) -> None:
    """The router knows of a reset cache after vLLM's next step, with which vLLM publishes
    `AllBlocksCleared`.
    """
    for server in vllm.servers:
        status, _ = await server.post("/reset_prefix_cache")
        assert status == 200
        assert not await server.cached()
        body = {"model": MODEL, "prompt": words(random.Random(4), 30), "max_tokens": 1}
        await server.post("/v1/completions", body)
    await vllm.until_true()


async def test_routed_answers_equal_the_servers(vllm: Pool) -> None:
    """The router's answers at temperature 0, one at a time, equal the server's except for ids,
    times and cached tokens.
    """
    for path, body in requests(seed=5, count=24):
        body |= {"temperature": 0, "max_tokens": 8}
        status, routed = await vllm.ask(path, body)
        direct_status, direct = await vllm.servers[0].post(path, body)
        assert (status, _comparable(routed)) == (direct_status, _comparable(direct))


async def test_refusals_equal_the_servers(vllm: Pool) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": MODEL, "prompt": [10**6], "max_tokens": 1},
        {"model": MODEL, "prompt": "x", "temperature": -1},
        {"model": MODEL, "prompt": "x", "max_tokens": 10**6},
    ]
    for body in bodies:
        status, routed = await vllm.ask("/v1/completions", body)
        direct_status, direct = await vllm.servers[0].post("/v1/completions", body)
        assert (status, _comparable(routed)) == (direct_status, _comparable(direct)), body
    # The router itself refuses what no server could accept.
    status, refused = await vllm.ask("/v1/completions", {"model": MODEL, "prompt": [1] * 5000})
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
    for row in await vllm.router.rows():
        assert row["state"] == "ready"


def _comparable(answer: Any) -> str:
    """Return an answer without the fields that differ between two equal answers."""
    text = re.sub(
        r"'(id|created|cached_tokens|created_cache_tokens|request_id)': [^,}]+", "", str(answer)
    )
    return re.sub(r"\b(cmpl|chatcmpl|call|chatcmpl-tool)-[0-9a-f]+", "", text)
