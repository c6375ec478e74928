"""Tests of `warmroute doctor --routing` with real vLLM servers: the doctor names a planted cause
first.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hybrid_models import GEMMA
from tests.engines.lying_front import fronted
from tests.engines.model import LORA
from tests.engines.pool import Pool, routed, started
from tests.engines.vllm_server import BLOCK_SIZE, MODEL, Server
from tests.live.commands import output_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEAD = [10 + number for number in range(12 * BLOCK_SIZE)]
REQUESTS = 10
FORGOTTEN_S = 0.8  # without requests the router ticks every half a second


SHARED = [{"prompt": [*HEAD, *range(n * 70 + 9, n * 70 + 79)]} for n in range(REQUESTS)]
Bodies = list[dict[str, Any]]


async def found(
    pool: Pool, *more: str, bodies: Bodies = SHARED, worker: int = 0, pause_s: float = 0.0
) -> list[str]:
    """Send requests that share their beginnings, or `bodies`; return the causes that the doctor
    finds.
    """
    await pool.router.until_state(worker, "ready")
    for body in bodies:
        await asyncio.sleep(pause_s)
        sent = {"model": MODEL, "max_tokens": 1} | body
        status, answer = await pool.ask("/v1/completions", sent)
        assert status == 200, answer
    words = ("doctor", "--routing", pool.router.admin, "--seconds", "0.5", "--json", *more)
    status, said = await output_of(*words)
    report = json.loads(said)
    assert status == bool(report["findings"]), said
    return [one["cause"] for one in report["findings"]]


async def found_alone(url: str) -> list[str]:
    """Return the causes that the doctor finds at a server without a router."""
    _, said = await output_of("doctor", "--routing", url, "--seconds", "0.5", "--json")
    return [one["cause"] for one in json.loads(said)["findings"]]


async def test_the_doctor_finds_no_cause_at_a_healthy_server(vllm: Pool) -> None:
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
async def test_the_doctor_finds_wrong_worker_options(vllm: Pool, options: str, cause: str) -> None:
    if vllm.environment.release < (0, 31):
        pytest.skip("vLLM before 0.31 does not name the address of its KV events")
    async with routed(vllm, f"{vllm.servers[0].url},{options}") as pool:
        assert (await found(pool))[:1] == [cause]
        await pool.router.remove(0)
        mended = await pool.router.add(vllm.servers[0].url)
        assert await found(pool, worker=mended) == []


@pytest.mark.full
async def test_the_doctor_finds_disabled_prefix_caching(vllm: Pool) -> None:
    flags = ("--no-enable-prefix-caching",)
    async with (
        started(vllm, publishes=False, flags=flags) as server,
        routed(vllm, server.url) as pool,
    ):
        assert (await found(pool))[:1] == ["prefix-caching-off"]
        assert await found_alone(server.url) == ["prefix-caching-off"]


async def test_the_doctor_finds_disabled_events(vllm: Pool) -> None:
    async with started(vllm, publishes=False) as server, routed(vllm, server.url) as pool:
        assert (await found(pool))[:1] == ["events-off"]
        assert await found_alone(server.url) == ["events-off"]


async def test_the_doctor_finds_unreported_hits(vllm: Pool) -> None:
    def silent(answer: str) -> str:
        told = json.loads(answer)
        told["usage"]["prompt_tokens_details"] = None
        return json.dumps(told)

    server = vllm.servers[0]
    async with fronted(server.url) as front:
        front.changes["/v1/completions"] = silent
        async with routed(vllm, server.spec_at(front.url)) as pool:
            assert await found(pool) == ["hits-not-reported"]
            front.changes.clear()
            assert await found(pool) == []


async def test_the_doctor_finds_prompts_without_a_common_beginning(
    vllm: Pool, tmp_path: Path
) -> None:
    salted = [{"prompt": HEAD, "cache_salt": f"salt-{n}"} for n in range(REQUESTS)]
    headed = [{"prompt": [700 + n, 800 + n, *HEAD]} for n in range(REQUESTS)]
    for bodies, cause in ((salted, "salts"), (headed, "heads-differ")):
        path = tmp_path / f"{cause}.jsonl"
        path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        async with routed(vllm, servers=(vllm.servers[0],)) as pool:
            assert (await found(pool, "--requests", str(path), bodies=bodies))[:1] == [cause]
            path.write_text("".join(json.dumps(body) + "\n" for body in SHARED))
            assert await found(pool, "--requests", str(path)) == []


async def test_the_doctor_finds_a_proxy_that_renames_an_adapter(vllm: Pool) -> None:
    """The doctor finds a proxy that renames a LoRA adapter: the server's events have its own name
    of the adapter, and requests have the proxy's.

    The router first forgets its speculative entries for its own requests, which it would otherwise
    expect to hit.
    """
    server, alias = vllm.servers[0], "corsair"
    bodies: Bodies = [body | {"model": alias} for body in SHARED[:6]]
    forgetful = ("--timeouts-speculative-s", "0.1")
    async with fronted(server.url) as front:
        front.asks = lambda body: body.replace(alias.encode(), LORA.encode())
        front.changes["/v1/models"] = lambda said: said.replace(LORA, alias)
        async with routed(vllm, server.spec_at(front.url), more=forgetful) as pool:
            assert (await found(pool, bodies=bodies, pause_s=FORGOTTEN_S))[:1] == ["lora-names"]
            front.asks = bytes
            front.changes.clear()
            await pool.router.remove(0)
            mended = await pool.router.add(server.spec)
            bodies = [body | {"model": LORA} for body in SHARED]
            assert await found(pool, bodies=bodies, worker=mended) == []


def cut_short() -> Bodies:
    """Return request bodies: prompts, each followed by two that share less and less of it."""
    bodies: Bodies = []
    for base in range(4):
        long = [100 + base * 500 + n for n in range(14 * BLOCK_SIZE)]
        for blocks in (14, 12, 9):
            own = range(2200 + len(bodies) * 70, 2270 + len(bodies) * 70)
            bodies.append({"prompt": [*long[: blocks * BLOCK_SIZE], *own]})
    return bodies


@pytest.mark.full
async def test_the_doctor_finds_windows_kept_only_at_the_ends_of_prompts(
    vllm: Pool, tmp_path: Path
) -> None:
    model = GEMMA.make(tmp_path / "model")
    for retention, causes in (("0", ["states-dropped"]), ("None", [])):
        server = Server(
            vllm.environment, model, tmp_path / retention, adapted=False, blocks=GEMMA.blocks,
            flags=[*GEMMA.flags(model), "--prefix-cache-retention-interval", retention],
        )  # fmt: skip
        await server.start()
        try:
            await server.until_healthy()
            async with routed(vllm, server.spec) as pool:
                assert (await found(pool, bodies=cut_short()))[:1] == causes
        finally:
            await server.stop()
