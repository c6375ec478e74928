"""Prefill at one real vLLM, decode at another: KV goes between them, and answers stay the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_VLLM, Environment
from tests.engines.traffic import words
from tests.engines.vllm_server import MODEL, Server
from tests.live.ports import lasting_port
from tests.live.stack import Stack, metric_sum

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
# The first transfer of a pair stops a server on a CPU for as long: its threads share one core.
HANDSHAKE_S = 60.0
ROLES = ("prefill", "decode")


class SplitServer(Server):
    """A server that gives its KV to others, and takes theirs."""

    def variables(self) -> dict[str, str]:
        return {**super().variables(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(lasting_port())}


@dataclass(frozen=True, slots=True)
class Split:
    """Lifetime: module of tests."""

    servers: list[Server]
    router: Stack
    access_log: Path

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.router.http.post(f"{self.router.url}{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def counted(self, server: int, metric: str) -> float:
        return await metric_sum(self.router.http, self.servers[server].url, metric)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Split]:
    environment = Environment("vllm", NEWEST_VLLM)
    if environment.unavailable:
        pytest.skip(environment.unavailable)
    folder = tmp_path_factory.mktemp("split")
    flags = ("--kv-transfer-config", json.dumps(CONNECTOR))
    servers: list[Server] = [
        SplitServer(environment, model, folder / role, flags=flags) for role in ROLES
    ]
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        try:
            await asyncio.gather(*(server.start() for server in servers))
            await asyncio.gather(*(server.until_healthy() for server in servers))
            log = folder / "access.jsonl"
            arguments = ["serve", "--port", "0", "--admin-port", "0", "--tokenizer", str(model)]
            arguments += ["--access-log", str(log), "--timeouts-stall-s", str(HANDSHAKE_S)]
            for server, role in zip(servers, ROLES, strict=True):
                arguments += ["--worker", f"{server.spec},role={role}"]
            started = await programs.start("router", "router", arguments)
            router = Stack(programs, started, [], http)
            for worker_id in range(len(servers)):
                await router.until_state(worker_id, "ready")
            yield Split(servers, router, log)
        finally:
            await asyncio.gather(*(server.stop() for server in servers))


@asynccontextmanager
async def decoding(split: Split, streams: int = 2) -> AsyncIterator[None]:
    """The server that decodes does so for others, who would wait for a prefill beside them."""

    async def stream(serial: int) -> None:
        body = {
            "model": MODEL, "prompt": words(random.Random(serial), 20), "max_tokens": 3_000,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with split.router.http.post(f"{split.router.url}/v1/completions", json=body) as reply:
            assert reply.status == 200
            async for _ in reply.content:
                if not begun[serial].is_set():
                    begun[serial].set()

    begun = [asyncio.Event() for _ in range(streams)]
    tasks = [asyncio.create_task(stream(serial)) for serial in range(streams)]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def asked(serial: int) -> tuple[str, dict[str, Any]]:
    text = words(random.Random(1_000 + serial), 600)
    common = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    if serial % 2:
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


def said(answer: Any) -> Any:
    (choice,) = answer["choices"]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


async def test_answers_are_those_of_one_server_and_their_kv_was_sent(split: Split) -> None:
    before = await split.counted(1, "vllm:nixl_bytes_transferred_sum")
    async with decoding(split):
        for serial in range(6):
            path, body = asked(serial)
            status, answer = await split.ask(path, body)
            assert status == 200, answer
            _, direct = await split.servers[1].post(path, body)
            assert said(answer) == said(direct)
            assert not answer.get("kv_transfer_params"), "no worker's address for clients"
            assert answer["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert await split.counted(1, "vllm:nixl_bytes_transferred_sum") > before
    assert await split.counted(0, "vllm:nixl_num_kv_expired_reqs") == 0
    await split.router.assert_idle()
    lines = [json.loads(line) for line in split.access_log.read_text().splitlines()]
    assert [line["attempts"] for line in lines if line["prompt_tokens"] > 500] == [2] * 6
