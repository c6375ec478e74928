"""Tests of real vLLM with OffloadingConnector: what its events say of host memory, and what it
reuses.

Scheduler, manager of host memory and events are vLLM's own; no data is copied (`offload_plugin`).
The KV cache is small, so that blocks are evicted from GPU and host memory throughout.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import zmq.asyncio

from kvkernels import EventBatch, PrefixIndex, WorkerBlocks, chain_hashes, chain_seed
from tests.effort import QUICK
from tests.engines.environment import NEWEST_VLLM, Environment
from tests.engines.vllm_server import BLOCK_SIZE, MODEL, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLUGIN = Path(__file__).with_name("offload_plugin.py")
HOST_BYTES = 3_000_000  # about a hundred blocks of the small model
GPU_BLOCKS = 24
REQUESTS = 60 if QUICK else 150
EXACT_SHARE = 0.98
EVENT_WAIT_S = 0.1  # vLLM publishes a step's blocks in its own thread, and answers may overtake it
Asked = tuple[list[int], str | None]  # a prompt and its salt


@dataclass(slots=True)
class OffloadingServer(Server):
    """A server that keeps blocks in host memory when they leave its GPU. Lifetime: fixture."""

    describes_itself: bool = False

    def variables(self) -> Mapping[str, str]:
        plugin = self.folder / "plugin"
        plugin.mkdir(exist_ok=True)
        shutil.copy(PLUGIN, plugin)
        return {**Server.variables(self), "WARMROUTE_MODULES": str(plugin)}

    def command(self) -> list[str]:
        extra = {"spec_name": "OffloadingSpec", "spec_module_path": PLUGIN.stem}
        extra |= {"cpu_bytes_to_use": HOST_BYTES, "block_size": BLOCK_SIZE}
        extra |= {"self_describing_kv_events": self.describes_itself}
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        transfer = json.dumps(connector | {"kv_connector_extra_config": extra})
        limit = str(BLOCK_SIZE * 16)
        flags = ("--kv-transfer-config", transfer, "--max-model-len", limit)
        return [*Server.command(self), *flags]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[False, True])
async def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> AsyncIterator[OffloadingServer]:
    """Yield two servers in turn: one whose offload events only name blocks, and one whose events
    describe them.
    """
    environment = Environment("vllm", NEWEST_VLLM).or_skip()
    one = OffloadingServer(
        environment, model, tmp_path_factory.mktemp("tiers"), blocks=GPU_BLOCKS, adapted=False,
        describes_itself=request.param,
    )  # fmt: skip
    await one.start()
    try:
        await one.until_healthy()
        yield one
    finally:
        await one.stop()


class ReportedBlocks:
    """The blocks that a server holds according to its events. Lifetime: test."""

    def __init__(self) -> None:
        self.index = PrefixIndex(1)
        self.blocks = WorkerBlocks(self.index, 0, BLOCK_SIZE, MODEL, counts_copies=True)

    async def read(self, events: zmq.asyncio.Socket) -> None:
        """Apply events from the socket until cancelled."""
        while True:
            self.blocks.apply(EventBatch((await events.recv_multipart())[-1]))

    def hits(self, prompt: list[int], salt: str | None) -> list[int]:
        """Return how many of the prompt's tokens are on the GPU, and how many are on the GPU or in
        host memory.
        """
        seed = 0 if salt is None else chain_seed(MODEL, None, salt)
        chain = chain_hashes(np.array(prompt[:-1], dtype=np.int32), BLOCK_SIZE, seed)
        tiers = self.index.longest_prefix_tiers(chain)[:, 0]
        return [int(blocks) * BLOCK_SIZE for blocks in tiers[:2]]


def prompts(draw: random.Random) -> list[Asked]:
    """Return new prompts with shared beginnings, repeated ones and shortened ones; some have a
    salt.
    """

    def ids(least: int, most: int) -> list[int]:
        return [draw.randrange(5, 200) for _ in range(draw.randrange(least, most))]

    roots, asked = [ids(60, 300) for _ in range(5)], list[Asked]()
    for _ in range(REQUESTS):
        prompt, salt = draw.choice(roots) + ids(10, 150), draw.choice([None, None, None, "s"])
        if asked and draw.random() < 0.5:
            prompt, salt = draw.choice(asked[-25:])
            if draw.random() < 0.4:
                prompt = prompt[: draw.randrange(20, len(prompt) + 1)]
        # vLLM takes all of a prompt of whole blocks from host memory, but from the GPU one token
        # less.
        asked.append((prompt + [7] * (len(prompt) % BLOCK_SIZE == 0), salt))
    return asked


async def completed(http: aiohttp.ClientSession, server: Server, asked: Asked) -> int:
    """Complete a prompt; return the cached tokens that the answer's usage reports."""
    prompt, salt = asked
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    body |= {} if salt is None else {"cache_salt": salt}
    async with http.post(f"{server.url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_hits_in_host_memory_equal_those_in_events(
    server: OffloadingServer, record_property: Callable[[str, object], None]
) -> None:
    context = zmq.asyncio.Context()
    events = context.socket(zmq.SUB)
    events.connect(f"tcp://127.0.0.1:{server.events[0]}")
    events.subscribe(b"")
    told, seen = ReportedBlocks(), list[tuple[int, int, int]]()
    reading = asyncio.create_task(told.read(events))
    try:
        async with aiohttp.ClientSession() as http:
            await asyncio.sleep(1.0)  # until the subscription has taken hold
            for asked in prompts(random.Random(0)):
                await asyncio.sleep(EVENT_WAIT_S)
                gpu, both = told.hits(*asked)
                seen.append((gpu, both, await completed(http, server, asked)))
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        context.destroy(linger=0)
    unequal = [(number, *one) for number, one in enumerate(seen) if one[1] != one[2]]
    record_property("equal", f"{REQUESTS - len(unequal)} of {REQUESTS}")
    record_property("equal by the GPU alone", sum(gpu == cached for gpu, _, cached in seen))
    assert len(unequal) <= (1 - EXACT_SHARE) * REQUESTS, unequal
    assert not [one for one in seen if one[1] > one[2]], "more than vLLM found"
    assert sum(gpu < cached for gpu, _, cached in seen) > REQUESTS / 4, "host memory was of use"
    assert told.blocks.skips() == {}
