"""Our own engines as a split pool behind the router: answers, faults, nothing left behind."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from engine.timed import continuation
from simulator.live.processes import Program, Programs
from tests.live.stack import Stack, engine_arguments, metric_sum, until

VOCAB = 32_000
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of each role, and a router that splits what it can."""

    stack: Stack
    workers: dict[str, list[Program]]
    flags: dict[str, list[str]]  # by the worker's name
    log: Path

    async def ask(self, serial: int, tokens: int = 300, output: int = 8) -> tuple[int, Any]:
        prompt = prompt_of(serial, tokens)
        return await self.stack.complete(prompt, max_tokens=output, return_token_ids=True)

    async def counted(self, role: str, metric: str) -> float:
        alive = [one for one in self.workers[role] if one.process.returncode is None]
        return sum([await metric_sum(self.stack.http, one.url, metric) for one in alive])

    async def at_rest(self) -> None:
        """No request, no lease and no block is held anywhere."""
        await self.stack.assert_idle()
        names = ("warmroute_engine_kv_imports", "vllm:kv_cache_usage_perc")

        async def idle() -> bool:
            held = [await self.counted(role, name) for role in ROLES for name in names]
            return not any(held)

        await until(idle, "all blocks to be free")

    async def until_split(self, requests: int) -> None:
        """Wait until the access log has so many requests of two legs or more."""

        async def written() -> bool:
            lines = [json.loads(line) for line in self.log.read_text().splitlines()]
            return sum(line["attempts"] >= 2 for line in lines) == requests

        await until(written, f"{requests} requests of two legs")


def prompt_of(serial: int, tokens: int) -> list[int]:
    return [random.Random(serial).randrange(VOCAB) for _ in range(tokens)]


@asynccontextmanager
async def pool(folder: Path, each: int = 1, **engine: Any) -> AsyncIterator[Pool]:
    """`each` timed workers of either role."""
    flags = {
        f"{role}-{n}": [*engine_arguments(**engine), "--role", role]
        for role in ROLES
        for n in range(each)
    }
    async with served(folder, flags) as made:
        yield made


@asynccontextmanager
async def served(folder: Path, flags: dict[str, list[str]]) -> AsyncIterator[Pool]:
    log = folder / "access.jsonl"
    async with Programs(folder / "logs") as programs, aiohttp.ClientSession() as http:
        workers: dict[str, list[Program]] = {role: [] for role in ROLES}
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--access-log", str(log)]
        arguments += ["--disaggregation", "always", "--retries-backoff-s", "0"]
        for name, given in flags.items():
            role = name.partition("-")[0]
            workers[role].append(await programs.start(name, "engine", given))
            arguments += ["--worker", f"{workers[role][-1].url},role={role}"]
        everybody = [one for role in ROLES for one in workers[role]]
        router = await programs.start("router", "router", arguments)
        stack = Stack(programs, router, everybody, http)
        for worker_id in range(len(everybody)):
            await stack.until_state(worker_id, "ready")
        yield Pool(stack, workers, flags, log)


def right(serial: int, answer: Any, tokens: int = 300, output: int = 8) -> bool:
    said: list[int] = answer["choices"][0]["token_ids"]
    return said == continuation(prompt_of(serial, tokens), output, VOCAB)


async def test_two_workers_with_roles_are_a_pair(tmp_path: Path) -> None:
    async with pool(tmp_path) as both:
        for serial in range(10):
            status, answer = await both.ask(serial)
            assert (status, right(serial, answer)) == (200, True)
            assert "kv_transfer_params" not in answer
        await both.at_rest()
        await both.until_split(10)
        assert await both.counted("decode", "warmroute_engine_kv_bytes_total") > 10 * 18 * 2**21
        assert await both.counted("prefill", "vllm:nixl_num_kv_expired_reqs_total") == 0
