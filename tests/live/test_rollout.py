"""Tests of a rollout under load: our own prefill and decode engines are replaced one by one, also
at the same URLs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from simulator.live.processes import Program, Programs
from tests.live.stack import Stack, engine_arguments, until

ROLES = ("prefill", "decode", "prefill", "decode")
SESSIONS, CLIENTS = 60, 6
VOCAB = 32_000


@dataclass
class Rollout:
    """Workers of two revisions behind a router, and the answers of clients. Lifetime: test."""

    stack: Stack
    revisions: dict[int, str] = field(default_factory=dict)  # by worker
    programs: dict[int, Program] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    over: bool = False

    async def join(self, role: str, revision: str) -> int:
        name = f"{role}-{len(self.revisions)}"
        flags = [*engine_arguments(speed=50), "--role", role, "--revision", revision]
        program = await self.stack.programs.start(name, "engine", flags)
        worker_id = await self.stack.add(program.url)
        self.revisions[worker_id], self.programs[worker_id] = revision, program
        return worker_id

    async def leave(self, worker_id: int) -> None:
        """Drain a worker as a controller does, and wait until it is gone."""
        url = f"{self.stack.admin}/workers/{worker_id}"
        async with self.stack.http.delete(url) as reply:
            assert reply.status < 300, await reply.text()

        async def gone() -> bool:
            return worker_id not in {row["id"] for row in await self.stack.rows()}

        await until(gone, f"worker {worker_id} to be gone")
        self.programs.pop(worker_id).process.terminate()

    async def ask(self, serial: int) -> None:
        draw = random.Random(serial)
        prompt = [draw.randrange(VOCAB) for _ in range(300)]
        headers = {"x-session-id": f"s{serial % SESSIONS}"}
        status, _ = await self.stack.complete(prompt, headers=headers, max_tokens=8)
        self.statuses[status] += 1

    async def clients(self) -> None:
        serials = itertools.count()

        async def client() -> None:
            while not self.over:
                await self.ask(next(serials))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))


def pairs_in(log: Path) -> list[dict[str, int]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line.get("prefill_worker") is not None]


async def test_workers_of_both_roles_are_replaced_one_by_one(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--access-log", str(log)]
    arguments += ["--disaggregation", "always", "--retries-backoff-s", "0"]
    async with Programs(tmp_path / "logs") as programs, aiohttp.ClientSession() as http:
        router = await programs.start("router", "router", arguments)
        one = Rollout(Stack(programs, router, [], http))
        old = [await one.join(role, "v1") for role in ROLES]
        load = asyncio.create_task(one.clients())
        shown: list[set[str]] = []
        for worker_id, role in zip(old, ROLES, strict=True):
            await asyncio.sleep(0.3)
            await one.join(role, "v2")
            await asyncio.sleep(0.3)
            await one.leave(worker_id)
            shown.append({row["revision"] for row in await one.stack.rows()})
        await asyncio.sleep(0.5)
        one.over = True
        await load
        await one.stack.assert_idle()
    pairs = pairs_in(log)
    revisions = [(one.revisions[p["prefill_worker"]], one.revisions[p["worker"]]) for p in pairs]
    print(f"\n{one.statuses.total()} requests, pairs: {Counter(revisions)}")
    assert shown == [{"v1", "v2"}] * 3 + [{"v2"}]
    assert set(one.statuses) == {200}
    assert set(revisions) == {("v1", "v1"), ("v2", "v2")}
    assert revisions[-1] == ("v2", "v2")


@dataclass
class Places:
    """Engine processes at fixed URLs, which can be replaced. Lifetime: test."""

    stack: Stack
    flags: dict[str, list[str]] = field(default_factory=dict)  # by name
    programs: dict[str, Program] = field(default_factory=dict)

    async def start(self, name: str, revision: str) -> Program:
        """Stop the process with this name, if any, and start one of this revision at the
        same URL.
        """
        if (before := self.programs.get(name)) is not None:
            before.process.terminate()
            await before.process.wait()
        flags = [*self.flags[name], "--revision", revision]
        program = await self.stack.programs.start(f"{name}-{revision}", "engine", flags)
        self.programs[name] = program
        return program

    async def passed(self, *names: str) -> float:
        """Return how many prompts' KV these processes sent or received since they started."""
        counts = "warmroute_engine_kv_exports_ended_total", "warmroute_engine_kv_reads_total"
        ends = 'end="read"', 'outcome="received"'
        total = 0.0
        for name in names:
            async with self.stack.http.get(f"{self.programs[name].url}/metrics") as reply:
                lines = (await reply.text()).splitlines()
            total += sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if line.startswith(counts) and any(end in line for end in ends)
            )
        return total


async def test_processes_of_both_roles_are_replaced_in_place(tmp_path: Path) -> None:
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--disaggregation", "always"]
    async with Programs(tmp_path / "logs") as programs, aiohttp.ClientSession() as http:
        router = await programs.start("router", "router", arguments)
        places = Places(Stack(programs, router, [], http))
        one = Rollout(places.stack)
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            places.flags[name] = [*engine_arguments(speed=50), "--role", name.partition("-")[0]]
            await places.stack.add((await places.start(name, "v1")).url)

        async def replaced(name: str) -> None:
            """Replace a process under load, continue the load, and wait for its last answer."""
            one.over = False
            load = asyncio.create_task(one.clients())
            await asyncio.sleep(0.3)
            await places.start(name, "v2")
            await asyncio.sleep(2.0)
            one.over = True
            await load
            await places.stack.assert_idle()

        await replaced("decode-0")
        assert await places.passed("decode-0") == 0  # both prefill workers have the other revision
        await replaced("prefill-0")
        moved = await places.passed("decode-0")
        assert moved == await places.passed("prefill-0") > 0
        await replaced("decode-1")
        assert await places.passed("decode-0", "decode-1") == await places.passed("prefill-0")
        await replaced("prefill-1")
        among = await places.passed("prefill-0", "prefill-1")
        assert await places.passed("decode-0", "decode-1") == among > moved
        print(f"\n{one.statuses.total()} requests, {among:.0f} pairs of v2")
        assert set(one.statuses) == {200}
