"""`warmroute doctor --routing` before real vLLM servers: what is planted is found first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.lying_front import fronted
from tests.engines.pool import Pool, routed, started
from tests.engines.vllm_server import BLOCK_SIZE, MODEL
from tests.live.commands import said_by

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEAD = [10 + number for number in range(12 * BLOCK_SIZE)]
REQUESTS = 10


async def found(pool: Pool, *more: str, bodies: list[dict[str, Any]] | None = None) -> list[str]:
    """The causes that are found after requests that share their heads, or after `bodies`."""
    shared = [{"prompt": [*HEAD, *range(n * 70 + 9, n * 70 + 79)]} for n in range(REQUESTS)]
    await pool.router.until_state(0, "ready")
    for body in bodies or shared:
        sent = {"model": MODEL, "max_tokens": 1} | body
        status, answer = await pool.ask("/v1/completions", sent)
        assert status == 200, answer
    words = ("doctor", "--routing", pool.router.admin, "--seconds", "0.5", "--json", *more)
    status, said = await said_by(*words)
    report = json.loads(said)
    assert status == bool(report["findings"]), said
    return [one["cause"] for one in report["findings"]]


async def found_alone(url: str) -> list[str]:
    """The causes that are found of a server alone."""
    _, said = await said_by("doctor", "--routing", url, "--seconds", "0.5", "--json")
    return [one["cause"] for one in json.loads(said)["findings"]]


async def test_a_healthy_server_shows_nothing(vllm: Pool) -> None:
    async with routed(vllm, servers=(vllm.servers[0],)) as pool:
        assert await found(pool) == []
        assert await found_alone(pool.servers[0].url) == []


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ("events=none", "events-not-read"),
        ("events=tcp://127.0.0.1:9", "events-elsewhere"),
        (f"block_size={2 * BLOCK_SIZE}", "block-sizes"),
    ],
)
async def test_a_worker_s_line_is_wrong(vllm: Pool, options: str, cause: str) -> None:
    if vllm.environment.release < (0, 31):
        pytest.skip("vLLM before 0.31 does not name the address of its KV events")
    async with routed(vllm, f"{vllm.servers[0].url},{options}") as pool:
        assert (await found(pool))[:1] == [cause]


async def test_prefix_caching_is_off(vllm: Pool) -> None:
    flags = ("--no-enable-prefix-caching",)
    async with (
        started(vllm, publishes=False, flags=flags) as server,
        routed(vllm, server.url) as pool,
    ):
        assert (await found(pool))[:1] == ["prefix-caching-off"]
        assert await found_alone(server.url) == ["prefix-caching-off"]


async def test_events_are_off(vllm: Pool) -> None:
    async with started(vllm, publishes=False) as server, routed(vllm, server.url) as pool:
        assert (await found(pool))[:1] == ["events-off"]
        assert await found_alone(server.url) == ["events-off"]


async def test_hits_are_not_reported(vllm: Pool) -> None:
    def silent(answer: str) -> str:
        told = json.loads(answer)
        told["usage"]["prompt_tokens_details"] = None
        return json.dumps(told)

    server = vllm.servers[0]
    async with fronted(server.url) as front:
        front.changes["/v1/completions"] = silent
        async with routed(vllm, server.spec_at(front.url)) as pool:
            assert await found(pool) == ["hits-not-reported"]


async def test_prompts_share_nothing_at_their_heads(vllm: Pool, tmp_path: Path) -> None:
    salted = [{"prompt": HEAD, "cache_salt": f"salt-{n}"} for n in range(REQUESTS)]
    headed = [{"prompt": [700 + n, 800 + n, *HEAD]} for n in range(REQUESTS)]
    for bodies, cause in ((salted, "salts"), (headed, "heads-differ")):
        path = tmp_path / f"{cause}.jsonl"
        path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        async with routed(vllm, servers=(vllm.servers[0],)) as pool:
            assert (await found(pool, "--requests", str(path), bodies=bodies))[:1] == [cause]
