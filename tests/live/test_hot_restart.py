"""Tests of hot restarts: no request is refused or cut off, and the workers' caches stay known."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.frozen import runs
from tests.live.grpc_worker import grpc_worker, infer_request
from tests.live.handed_over import stage
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, Stack, engine_arguments, until

TOKENS = 150  # of each stream, so that some continue during the change
PREFIX = list(range(5_000, 5_000 + 320))


@dataclass
class Load:
    """Clients that send requests one after another, and the counts of their answers. Lifetime:
    test.
    """

    url: str
    ends: Counter[str] = field(default_factory=Counter)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def alone(self, number: int) -> None:
        """Send requests one after another, each on a new connection."""
        while not self.stop.is_set():
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector) as http:
                await self._one(http, number, stream=False, max_tokens=2)

    async def kept(self, number: int) -> None:
        """Send requests one after another on one connection until it closes, then on a new one."""
        async with aiohttp.ClientSession() as http:
            while not self.stop.is_set():
                await self._one(http, number, stream=False, max_tokens=2)

    async def streams(self, number: int) -> None:
        """Read long streams one after another."""
        async with aiohttp.ClientSession() as http:
            while not self.stop.is_set():
                await self._one(http, number, stream=True, max_tokens=TOKENS)

    async def _one(self, http: aiohttp.ClientSession, number: int, **fields: Any) -> None:
        body = {"model": MODEL, "prompt": [number] * 40} | fields
        try:
            async with http.post(f"{self.url}/v1/completions", json=body) as reply:
                data = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            self.ends[f"{fields['stream']}: {error!r}"] += 1
            return
        whole = not fields["stream"] or (
            data.endswith(b"data: [DONE]\n\n") and data.count(b"data: ") >= TOKENS
        )
        self.ends["ok" if reply.status == 200 and whole else f"{reply.status} {data[-90:]!r}"] += 1


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[Load]:
    load = Load(url)
    kinds = (load.alone, load.kept, load.streams)
    tasks = [asyncio.ensure_future(kind(n)) for n in range(4) for kind in kinds]
    try:
        yield load
    finally:
        load.stop.set()
        await asyncio.gather(*tasks)


async def ready(stack: Stack) -> None:
    for worker_id in range(2):
        await stack.until_state(worker_id, "ready")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_hot_restart_loses_no_request_and_cuts_no_stream(
    tmp_path: Path, shared: bool
) -> None:
    flags = ["--reuse-port", "true"] if shared else []
    ports = ["--port", str(lasting_port()), "--admin-port", "0"]
    async with stage(tmp_path, speed=4) as (routers, http):
        before = await routers.start("before", *flags, ports=ports)
        stack = Stack(routers.programs, before, routers.workers, http)
        await ready(stack)
        status, answer = await stack.complete([*PREFIX, 1])
        assert status == 200
        async with loaded(before.url) as load:
            await enough(load, 60)
            after = await routers.start("after", *flags, ports=ports)
            assert after.url == before.url
            assert await asyncio.wait_for(before.process.wait(), 40) == 0
            await enough(load, load.ends["ok"] + 60)
        assert set(load.ends) == {"ok"}, load.ends
        stack = Stack(routers.programs, after, routers.workers, http)
        status, answer = await stack.complete([*PREFIX, 2])
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PREFIX)
        await stack.assert_idle()


async def test_grpc_calls_continue_during_a_hot_restart(tmp_path: Path) -> None:
    grpc_port = str(lasting_port())
    ends: Counter[str] = Counter()
    stop = asyncio.Event()

    async def call(stub: Stub) -> None:
        try:
            ends[
                "ok" if (await stub.ModelInfer(infer_request("slow"))).id == "slow" else "wrong"
            ] += 1
        except grpc.aio.AioRpcError as error:
            ends[f"{error.code()}: {error.details()}"] += 1

    async def calls() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            while not stop.is_set():
                await call(Stub(channel))

    async def answered(count: int) -> None:
        async def reached() -> bool:
            return ends["ok"] >= count

        await until(reached, f"{count} answers ({ends})")

    async with stage(tmp_path) as (routers, http), grpc_worker() as one:
        routers.workers.clear()
        flags = ("--grpc-port", grpc_port, "--worker", f"{one.url},grpc={one.address}")
        before = await routers.start("before", *flags)
        await Stack(routers.programs, before, [], http).until_state(0, "ready")
        tasks = [asyncio.ensure_future(calls()) for _ in range(4)]
        await answered(8)
        after = await routers.start("after", *flags)
        assert await asyncio.wait_for(before.process.wait(), 40) == 0
        await answered(ends["ok"] + 8)
        stop.set()
        await asyncio.gather(*tasks)
        assert set(ends) == {"ok"}, ends
        await Stack(routers.programs, after, [], http).assert_idle()


async def enough(load: Load, count: int) -> None:
    async def reached() -> bool:
        return load.ends["ok"] >= count

    await until(reached, f"{count} answers ({load.ends})")


async def test_workers_added_and_drained_by_hand_are_kept_by_a_hot_restart(tmp_path: Path) -> None:
    async with stage(tmp_path) as (routers, http):
        third = await routers.programs.start("worker-2", "engine", engine_arguments())
        before = await routers.start("before")
        stack = Stack(routers.programs, before, routers.workers, http)
        await ready(stack)
        await stack.add(third.url)
        async with http.post(f"{stack.admin}/workers/1/drain") as reply:
            assert reply.status == 200
        url = f"{stack.admin}/workers/2/role"
        async with http.post(url, json={"role": "decode"}) as reply:
            assert reply.status == 202

        async def turned() -> bool:
            return bool((await stack.row(2))["role"] == "decode")

        await until(turned, "the new role")
        after = await routers.start("after")
        stack = Stack(routers.programs, after, routers.workers, http)
        rows = {row["url"]: row["state"] for row in await stack.rows()}
        states = ("ready", "draining", "ready")
        urls = [worker.url for worker in (*routers.workers, third)]
        assert rows == dict(zip(urls, states, strict=True))
        roles = {row["url"]: row["role"] for row in await stack.rows()}
        assert roles == dict(zip(urls, ("both", "both", "decode"), strict=True))
        assert await before.process.wait() == 0


async def test_discovered_workers_are_kept_if_the_new_router_cannot_discover_them(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as (routers, http):
        names = tmp_path / "workers.txt"
        names.write_text("".join(f"{one.url}\n" for one in routers.workers))
        workers, routers.workers = routers.workers, []
        before = await routers.start("before", "--discover", f"file:{names}")
        first = Stack(routers.programs, before, workers, http)

        async def both() -> bool:
            return [row["state"] for row in await first.rows()] == ["ready"] * 2

        await until(both, "both to be found")
        names.unlink()
        after = await routers.start("after", "--discover", f"file:{names}")
        stack = Stack(routers.programs, after, workers, http)
        rows = await stack.rows()
        assert {row["url"]: row["state"] for row in rows} == {one.url: "ready" for one in workers}
        assert {row["named_by"] for row in rows} == {f"file:{names}"}
        assert await before.process.wait() == 0
        assert await stack.metric("warmroute_discovery_up") == 0


async def test_a_new_router_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as (routers, http):
        before = await routers.start("before")
        stack = Stack(routers.programs, before, routers.workers, http)
        await ready(stack)
        taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = str(taken.sockets[0].getsockname()[1])
        with pytest.raises(RuntimeError, match=r"cannot listen on 127\.0\.0\.1"):
            await routers.start("after", ports=["--port", port, "--admin-port", "0"])
        taken.close()
        assert (await stack.complete([1, 2]))[0] == 200
        after = await routers.start("after")
        assert await before.process.wait() == 0
        stack = Stack(routers.programs, after, routers.workers, http)
        assert (await stack.complete([1, 2]))[0] == 200


async def test_sigusr2_starts_the_new_router_with_the_same_command(tmp_path: Path) -> None:
    async with stage(tmp_path) as (routers, http):
        before = await routers.start("before")
        stack = Stack(routers.programs, before, routers.workers, http)
        await ready(stack)
        before.process.send_signal(signal.SIGUSR2)
        assert await asyncio.wait_for(before.process.wait(), 40) == 0
        log = before.log.read_text()
        assert log.count("ready http") == 2
        assert (await stack.complete([1, 2]))[0] == 200
        pid = int(log.partition("INFO router.restart.hot_restart: SIGUSR2: process ")[2].split()[0])
        await end(pid)


async def end(pid: int) -> None:
    """Terminate a process that this process did not start, and wait until it is gone."""
    os.kill(pid, signal.SIGTERM)

    async def gone() -> bool:
        return not runs(pid)

    await until(gone, "the follower to end")
