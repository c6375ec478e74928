"""Starts replicas that pass KV events on to each other, and reads their views of the workers'
caches.
"""

from __future__ import annotations

import aiohttp

from router.admin.kv_view import KvView, decode_kv_view
from simulator.live.processes import Programs
from tests.live.stack import Stack, until


class Routers:
    """Starts several routers with the same workers. Lifetime: test."""

    def __init__(
        self, url: str, workers: list[str], programs: Programs, http: aiohttp.ClientSession
    ) -> None:
        self.url, self.workers, self.programs, self.http = url, workers, programs, http

    async def start(self, name: str) -> Stack:
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--state", self.url]
        for worker in self.workers:
            arguments += ["--worker", worker]
        arguments += ["--replicas-name", name]
        router = await self.programs.start(name, "router", arguments)
        stack = Stack(self.programs, router, [], self.http)
        for worker_id in range(len(self.workers)):
            await stack.until_state(worker_id, "ready")
        return stack


async def view(stack: Stack, worker_id: int = 0) -> KvView:
    async with stack.http.get(f"{stack.admin}/kv?worker={worker_id}") as reply:
        assert reply.status == 200
        return decode_kv_view(await reply.read())


async def until_known(stack: Stack, truth: list[int], worker_id: int = 0) -> None:
    async def known() -> bool:
        seen = await view(stack, worker_id)
        return seen.known and seen.index_agrees and seen.chains().tolist() == truth

    try:
        await until(known, f"{len(truth)} blocks to be known")
    except AssertionError as error:
        seen = await view(stack, worker_id), await stack.row(worker_id)
        raise AssertionError(f"{error}: {seen}") from error
