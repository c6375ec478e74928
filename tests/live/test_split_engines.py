"""Tests of our own engines as a disaggregated pool behind the router: answers, faults, and nothing
left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.model.tiny import make_tiny
from engine.timed import continuation
from simulator.live.processes import Program, Programs
from tests.effort import QUICK
from tests.frozen import freeze
from tests.live.stack import (
    MODEL,
    Stack,
    computing_arguments,
    engine_arguments,
    metric_sum,
    until,
)

VOCAB = 32_000
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Pool:
    """Prefill and decode workers behind a router that disaggregates whenever it can."""

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
        """Wait until no request, KV lease or block is held anywhere."""
        await self.stack.assert_idle()
        names = ("warmroute_engine_kv_imports", "vllm:kv_cache_usage_perc")

        async def idle() -> bool:
            held = [await self.counted(role, name) for role in ROLES for name in names]
            return not any(held)

        await until(idle, "all blocks to be free")

    async def until_split(self, requests: int) -> None:
        """Wait until the access log has `requests` requests that went to a prefill and a decode
        worker.
        """

        async def written() -> bool:
            lines = [json.loads(line) for line in self.log.read_text().splitlines()]
            return sum(line["attempts"] >= 2 for line in lines) == requests

        await until(written, f"{requests} requests of two legs")


def prompt_of(serial: int, tokens: int) -> list[int]:
    return [random.Random(serial).randrange(VOCAB) for _ in range(tokens)]


@asynccontextmanager
async def pool(folder: Path, each: int = 1, **engine: Any) -> AsyncIterator[Pool]:
    """Yield a pool with `each` simulated workers of each role."""
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


async def test_a_prefill_and_a_decode_worker_form_a_pair(tmp_path: Path) -> None:
    async with pool(tmp_path) as both:
        for serial in range(10):
            status, answer = await both.ask(serial)
            assert (status, right(serial, answer)) == (200, True)
            assert "kv_transfer_params" not in answer
        await both.at_rest()
        await both.until_split(10)
        assert await both.counted("decode", "warmroute_engine_kv_bytes_total") > 10 * 18 * 2**21
        assert await both.counted("prefill", "vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_kv_of_a_client_that_left_is_released_at_once(tmp_path: Path) -> None:
    """KV is given back at once when its client leaves while the decode worker does not respond; the
    lease alone would last an hour.
    """
    async with pool(tmp_path, **{"export-lease-s": 3_600}) as both:
        freeze(both.workers["decode"][0].process.pid)
        ask = asyncio.create_task(both.ask(0))

        async def is_kept() -> bool:
            return bool(await both.counted("prefill", "warmroute_engine_kv_exports"))

        async def is_free() -> bool:
            return not await both.counted("prefill", "vllm:kv_cache_usage_perc")

        await until(is_kept, "KV for the second leg")
        assert not await is_free()
        ask.cancel()
        await until(is_free, "the blocks to be free")
        os.kill(both.workers["decode"][0].process.pid, signal.SIGCONT)
        await both.at_rest()


async def test_kv_is_released_whenever_clients_disconnect(tmp_path: Path) -> None:
    """KV is given back whenever clients leave, here at random times between sending and the first
    token; leases last an hour.
    """
    departures, draw = 60 if QUICK else 1_000, random.Random(5)
    async with pool(tmp_path, **{"export-lease-s": 3_600}) as both:
        began_s = time.monotonic()
        assert (await both.ask(-1))[0] == 200
        usual_s = time.monotonic() - began_s
        serials = iter(range(departures))

        async def clients() -> None:
            for serial in serials:
                asking = asyncio.create_task(both.ask(serial))
                await asyncio.wait((asking,), timeout=draw.random() * 1.5 * usual_s)
                asking.cancel()
                await asyncio.wait((asking,))

        await asyncio.gather(*(clients() for _ in range(8)))
        left_s = time.monotonic()
        await both.at_rest()
        assert await both.counted("prefill", "warmroute_engine_kv_exports") == 0
        print(f"\n{departures} departures: no KV is pinned after {time.monotonic() - left_s:.2f} s")
        assert await both.counted("prefill", "vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_real_engines_of_different_shapes_form_a_pair(tmp_path: Path) -> None:
    """Engines of different shapes work as prefill and decode worker: one has tensor-parallel ranks,
    the other pipeline stages and another block size. The text equals that of one worker alone.
    """
    make_tiny(tmp_path / "model")
    shapes = {
        "prefill-0": ["--tensor-parallel-size", "2", "--block-size", "8", "--role", "prefill"],
        "decode-0": ["--pipeline-parallel-size", "2", "--block-size", "32", "--role", "decode"],
    }
    flags = {
        name: [*computing_arguments(tmp_path / "model"), "--kv-dtype", "int8", *shape]
        for name, shape in shapes.items()
    }
    async with served(tmp_path, flags) as both:
        decode = both.workers["decode"][0]
        requests = 2 if QUICK else 8  # greedy and sampled in turn
        for serial in range(requests):
            prompt = [token % 250 + 3 for token in prompt_of(serial, 100)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "return_token_ids": True}
            body |= {"seed": serial} if serial % 2 else {"temperature": 0}
            said = [await ids_at(both, url, body) for url in (both.stack.url, decode.url)]
            assert said[0] == said[1]
        await both.at_rest()
        assert await both.counted("decode", "warmroute_engine_kv_reads_total") == requests
        await both.until_split(requests)


async def ids_at(both: Pool, url: str, body: dict[str, Any]) -> list[int]:
    async with both.stack.http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return (await reply.json())["choices"][0]["token_ids"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Kill:
    """The role of which a worker is killed, and when: as soon as its metric is above zero."""

    role: str
    metric: str


KILLS = {
    "prefill in its leg": Kill("prefill", "vllm:num_requests_running"),
    "prefill in transfer": Kill("prefill", "warmroute_engine_kv_exports"),
    "decode before its first byte": Kill("decode", "warmroute_engine_kv_imports"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
async def test_no_request_fails_when_a_worker_is_killed(tmp_path: Path, kill: Kill) -> None:
    """No request fails when one of the two workers of a role is killed with SIGKILL.

    If it dies between a request and the connection for its KV, that KV's lease has to expire.
    """
    terms = {"kv-gbytes-per-s": 0.4, "export-lease-s": 3}
    async with pool(tmp_path, each=2, speed=2, **terms) as both:
        kills, first = 0, 0
        while kills < (2 if QUICK else 50):
            serials, first = range(first, first + 4), first + 4
            asks = [asyncio.create_task(both.ask(serial, 3_000)) for serial in serials]
            number = await busy(both, kill, asks)
            if number is not None:
                kills += 1
                victim = both.workers[kill.role][number]
                victim.process.kill()
                await victim.process.wait()
            for serial, (status, answer) in zip(serials, await asyncio.gather(*asks), strict=True):
                assert (status, right(serial, answer, 3_000)) == (200, True), answer
            if number is not None:
                await start_again(both, kill.role, number)
            assert first <= 8 * (kills + 2), "most requests were too quick to be caught"
        await both.at_rest()


async def busy(both: Pool, kill: Kill, asks: list[asyncio.Task[Any]]) -> int | None:
    """Return the first worker of the role whose metric is above zero, or None if all requests were
    answered before.
    """
    while not all(ask.done() for ask in asks):
        for number, one in enumerate(both.workers[kill.role]):
            if await metric_sum(both.stack.http, one.url, kill.metric):
                return number
    return None


async def start_again(both: Pool, role: str, number: int) -> None:
    name = f"{role}-{number}"
    again = await both.stack.programs.start(name, "engine", both.flags[name])
    worker_id = both.stack.workers.index(both.workers[role][number])
    both.workers[role][number] = both.stack.workers[worker_id] = again
    await both.stack.until_state(worker_id, "ready")
