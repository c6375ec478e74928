"""Tests with an ensemble in TensorRT-LLM's shape on four real Tritons: prompts go where their
prefix is.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_models import (
    MODELS,
    SOURCE,
    config_of,
)
from tests.engines.triton_server import TritonServer
from tests.live.stack import Stack, metric_sum, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVERS, SESSIONS, TURNS = 4, 24, 5
SYSTEM, QUESTION, ANSWER = 960, 128, 40  # words
COUNTED = ("hit_tokens", "prompt_tokens")
LONG = 1_000  # tokens of an answer: two seconds


class Ensembles(TritonServer):
    """A Triton server that serves the ensemble. Lifetime: fixture."""

    def repository(self) -> Path:
        """Create the ensemble's repository; return its folder."""
        models = self.folder / "models"
        for name in MODELS:
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (models / name / "config.pbtxt").write_text(config_of(name))
            if name != "ensemble":
                shutil.copy(SOURCE, version / "model.py")
        return models


async def counted(servers: list[Ensembles], what: str) -> float:
    """Return the sum of a counter over all servers since their start."""
    urls = [server.metrics_url.removesuffix("/metrics") for server in servers]
    async with aiohttp.ClientSession() as http:
        return sum([await metric_sum(http, url, f"tiny_{what}") for url in urls])


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[list[Ensembles]]:
    """Yield four servers, each with an empty cache."""
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    async with AsyncExitStack() as all_of:
        servers = [Ensembles(environment, folder, folder / f"triton-{n}") for n in range(SERVERS)]
        for server in servers:
            await server.start()
            all_of.push_async_callback(server.stop)
        await asyncio.gather(*(server.until_healthy() for server in servers))
        yield servers


def words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(9_999)}" for _ in range(count))


async def conversation(stack: Stack, name: str, number: int, dispatched: Counter[str]) -> None:
    """Send the turns of a conversation: each prompt has a common system prompt and all earlier
    turns.
    """
    draw = random.Random(f"{name} {number}")
    prompt = words(random.Random(name), SYSTEM)
    for _ in range(TURNS):
        prompt += " " + words(draw, QUESTION)
        body = {"text_input": prompt, "max_tokens": ANSWER}
        url = f"{stack.url}/v2/models/ensemble/generate"
        async with stack.http.post(url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            prompt += " " + (await reply.json())["text_output"]
            dispatched[reply.headers["x-warmroute-worker"]] += 1


async def hits_of(programs: Programs, servers: list[Ensembles], policy: str) -> tuple[float, float]:
    """Return the share of prompt tokens found in caches, and the busiest server's requests over the
    mean.

    Each policy gets other prompts; blocks left by earlier ones are evicted first.
    """
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--policy", policy]
    for server in servers:
        arguments += ["--worker", f"{server.url},metrics={server.metrics_url}"]
    before = [await counted(servers, what) for what in COUNTED]
    router = await programs.start(policy, "router", arguments)
    async with aiohttp.ClientSession() as http:
        stack = Stack(programs, router, [], http)
        for worker in range(SERVERS):
            await stack.until_state(worker, "ready")
        dispatched = Counter[str]()
        sessions = (conversation(stack, policy, n, dispatched) for n in range(SESSIONS))
        await asyncio.gather(*sessions)
        await stack.assert_idle()
    hit, prompt = [
        await counted(servers, what) - earlier
        for what, earlier in zip(COUNTED, before, strict=True)
    ]
    assert dispatched.total() == SESSIONS * TURNS
    return hit / prompt, max(dispatched.values()) * SERVERS / dispatched.total()


async def test_prompts_go_to_the_server_that_has_their_prefix(tmp_path: Path) -> None:
    """Prompts go to the server that has their prefix: four fifths of prompt tokens are cached, and
    no server gets more than 1.25 times its share.
    """
    async with served(tmp_path / "servers") as servers, Programs(tmp_path / "logs") as programs:
        blind, _ = await hits_of(programs, servers, "round_robin")
        hits, most = await hits_of(programs, servers, "warmset")
        await check_running_request_is_charged(programs, servers[0])
    print(json.dumps({"round_robin": blind, "warmset": hits, "max/mean": most}))
    assert hits >= 0.8
    assert hits > blind + 0.08
    assert most <= 1.25


async def check_running_request_is_charged(programs: Programs, server: Ensembles) -> None:
    """Check that a request stays charged after its client left, until the ensemble's middle step
    has ended.
    """
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--worker", server.url]
    router = await programs.start("left", "router", arguments)
    async with aiohttp.ClientSession() as http:
        stack = Stack(programs, router, [], http)
        await stack.until_state(0, "ready")
        before = await counted([server], "answers")

        async def running() -> bool:
            return (await stack.row(0))["inflight_requests"] == 1

        async def over() -> bool:
            return await counted([server], "answers") > before

        body = {"text_input": "a b c", "max_tokens": LONG}
        url = f"{router.url}/v2/models/ensemble/generate"
        ask = asyncio.create_task(http.post(url, json=body))
        await until(running, "the request to be charged")
        ask.cancel()
        charged = await running()  # first, because the answer may come between the two
        while not await over():
            assert charged, "its worker computes still"
            charged = await running()
        await stack.assert_idle()
