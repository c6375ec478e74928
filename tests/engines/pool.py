"""A router in front of real servers, whose view of their caches is compared with what they hold."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvkernels import chain_hashes, chain_seed
from router.admin.kv_view import KvView, decode_kv_view
from tests.engines.environment import VLLM_RELEASES, Environment
from tests.engines.vllm_server import Block, Server
from tests.live.stack import Stack, until

SERIALS = count(2)  # of what is started beside the pool


@dataclass(frozen=True, slots=True)
class Pool:
    """Real servers, a router in front of them, and the router's access log. Lifetime: session of
    tests.
    """

    environment: Environment
    model: Path
    servers: list[Server]
    router: Stack
    access_log: Path

    async def view(self, worker: int) -> KvView:
        """Return the router's view of a worker's cache."""
        url = f"{self.router.admin}/kv?worker={worker}"
        async with self.router.http.get(url) as reply:
            assert reply.status == 200, await reply.text()
            return decode_kv_view(await reply.read())

    async def indexed(self, worker: int) -> set[int]:
        """Return the chain hashes of the blocks that the router believes a worker to hold."""
        return set((await self.view(worker)).chains().tolist())

    async def held(self, worker: int) -> set[int]:
        """Return the chain hashes of the blocks that the worker itself reports."""
        server = self.servers[worker]
        return {chain_of(block, server) for block in await server.cached()}

    async def until_true(self) -> None:
        """Wait until the router's index equals each worker's own table, block for block."""
        for worker in range(len(self.servers)):

            async def equal(worker: int = worker) -> bool:
                return await self.indexed(worker) == await self.held(worker)

            await until(equal, f"the index of worker {worker} to equal the worker's own table")

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Send a request through the router; return (status, JSON)."""
        url = f"{self.router.url}{path}"
        async with self.router.http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    def logged(self) -> list[dict[str, Any]]:
        """Return the lines of the access log."""
        return [json.loads(line) for line in self.access_log.read_text().splitlines()]


def chain_of(block: Block, server: Server) -> int:
    """Return a block's chain hash; its salt and adapter are in the seed."""
    seed = 0
    if block.lora is not None or block.salt is not None:
        seed = chain_seed(server.name, block.lora, block.salt)
    chain = chain_hashes(np.asarray(block.tokens, dtype=np.int32), server.block_size, seed)
    return int(chain[-1])


@asynccontextmanager
async def routed(
    vllm: Pool,
    *specs: str,
    servers: tuple[Server, ...] = (),
    more: tuple[str, ...] = (),
    tokenizes: bool = True,
) -> AsyncIterator[Pool]:
    """Yield a new router with these workers. `more` has further command-line arguments; `tokenizes`
    gives the router the model's tokenizer.
    """
    programs, name = vllm.router.programs, f"router-{next(SERIALS)}"
    log = vllm.access_log.with_name(f"{name}.jsonl")
    arguments = ["serve", "--port", "0", "--admin-port", "0"]
    arguments += ["--tokenizer", str(vllm.model)] if tokenizes else []
    arguments += ["--access-log", str(log), "--intervals-health-s", "0.5"]
    arguments += more
    for spec in specs or [server.spec for server in servers]:
        arguments += ["--worker", spec]
    program = await programs.start(name, "router", arguments)
    stack = Stack(programs, program, [], vllm.router.http)
    try:
        yield Pool(vllm.environment, vllm.model, list(servers), stack, log)
    finally:
        program.process.terminate()
        await program.process.wait()


@asynccontextmanager
async def started(vllm: Pool, **options: Any) -> AsyncIterator[Server]:
    """Start one more server, of another release if one is installed."""
    others = (Environment("vllm", v) for v in VLLM_RELEASES if v != vllm.environment.version)
    environment = next((e for e in others if e.installed), vllm.environment)
    folder = vllm.servers[0].folder.with_name(f"server-{next(SERIALS)}")
    server = Server(environment, vllm.model, folder, **options)
    await server.start()
    try:
        await server.until_healthy()
        yield server
    finally:
        await server.stop()
