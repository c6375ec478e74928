"""Tests of workers, and of the router itself, that stop for a while: a slow worker is not treated
as dead.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from tests.frozen import freeze
from tests.live.failing_engine import MODEL as ENGINE_MODEL
from tests.live.failing_engine import FailingEngine, engine
from tests.live.stack import MODEL, Stack, running, until

FULL = [pytest.mark.full, pytest.mark.timeout(300)]
# The default is a probe a second; these are the same rules in a fifth of the time.
QUICK = [
    *("--intervals-health-s", "0.2", "--timeouts-probe-s", "0.4", "--limits-hold-s", "120"),
    *("--policy", "round_robin"),
]
PAUSES_S = [2.5, pytest.param(8.0, marks=FULL), pytest.param(20.0, marks=FULL)]


@dataclass
class Clients:
    """Sends requests at a steady rate, alternately streamed and unstreamed. Lifetime: test."""

    url: str
    http: aiohttp.ClientSession
    per_s: float = 20.0
    model: str = MODEL
    sent: int = 0
    failed: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)  # of the answers, in the order of their ends
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def come(self) -> None:
        """Begin requests at the rate until cancelled."""
        while True:
            one = asyncio.create_task(self._ask(self.sent))
            self._running.add(one)
            one.add_done_callback(self._running.discard)
            self.sent += 1
            await asyncio.sleep(1 / self.per_s)

    async def end(self) -> None:
        """Wait until each begun request has its answer."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self._running)

    async def _ask(self, number: int) -> None:
        stream = number % 2 == 0
        body = {"model": self.model, "prompt": [number] * 40, "max_tokens": 30, "stream": stream}
        try:
            async with self.http.post(f"{self.url}/v1/completions", json=body) as reply:
                data = await reply.read()
                whole = not stream or data.rstrip().endswith(b"data: [DONE]")
                if reply.status != 200 or not whole:
                    self.failed.append(f"{number}: {reply.status} {data[-200:]!r}")
                self.workers.append(reply.headers.get("x-warmroute-worker", ""))
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(f"{number}: {error!r}")


@asynccontextmanager
async def clients(stack: Stack, model: str = MODEL) -> AsyncIterator[Clients]:
    """Run clients during the block and wait for all their answers at its end."""
    # The next request comes however many wait.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        crowd = Clients(stack.url, http, model=model)
        coming = asyncio.create_task(crowd.come())

        async def warm() -> bool:
            return len(crowd.workers) >= 20

        await until(warm, "the first answers")
        try:
            yield crowd
        finally:
            coming.cancel()
        await crowd.end()


@contextmanager
def frozen(stack: Stack, numbers: list[int]) -> Iterator[None]:
    processes = [stack.workers[number].process for number in numbers]
    for process in processes:
        freeze(process.pid)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("pause_s", PAUSES_S)
async def test_stopping_all_workers_together_fails_no_request(
    tmp_path: Path, pause_s: float
) -> None:
    async with running(tmp_path, workers=3, router=QUICK) as stack:
        async with clients(stack) as crowd:
            with frozen(stack, [0, 1, 2]):
                await asyncio.sleep(pause_s)

                async def panics() -> bool:
                    states = {row["state"] for row in await stack.rows()}
                    return states == {"silent"} and await stack.metric("warmroute_panic") == 1

                await until(panics, "all to be silent")

                async def waits() -> bool:
                    return await stack.metric("warmroute_waiting_requests") > 0

                await until(waits, "new requests to wait")
                for path in ("/ready", f"/ready?model={MODEL}", "/v2/health/ready"):
                    async with stack.http.get(stack.url + path) as ready:
                        assert ready.status == 200, (path, await ready.text())

            async def all_ready() -> bool:
                return {row["state"] for row in await stack.rows()} == {"ready"}

            await until(all_ready, "all to be back")
        assert crowd.failed == []
        log = stack.router.log.read_text()
        assert log.count(f"most workers of {MODEL} leave probes unanswered") == 1
        assert log.count(f"most workers of {MODEL} answer again") == 1
        assert "is down" not in log
        assert await stack.metric("warmroute_ejections_total") == 0
        assert await stack.metric("warmroute_panic") == 0
        await stack.assert_idle()


async def test_a_dead_worker_among_stopped_ones_gets_and_fails_no_request(tmp_path: Path) -> None:
    """A dead worker among stopped ones gets no new request: only streams that it had begun are cut,
    and all other requests wait for the stopped workers.
    """
    async with running(tmp_path, workers=3, router=QUICK) as stack:
        with frozen(stack, [1, 2]):
            stack.workers[0].process.send_signal(signal.SIGKILL)
            await stack.until_state(0, "down")
            asking = [asyncio.create_task(stack.complete([n] * 20)) for n in range(10)]
            for worker_id in (1, 2):
                await stack.until_state(worker_id, "silent")
            asking += [asyncio.create_task(stack.complete([n] * 20)) for n in range(10)]
            await asyncio.sleep(1.0)
            assert not any(one.done() for one in asking)
        assert [(await one)[0] for one in asking] == [200] * 20
        await stack.assert_idle()


async def test_requests_wait_for_the_stopped_only_worker(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, router=QUICK) as stack:
        async with clients(stack) as crowd:
            with frozen(stack, [0]):
                await stack.until_state(0, "silent")
                await asyncio.sleep(0.5)
        assert crowd.failed == []
        await stack.assert_idle()


async def test_a_stopped_worker_gets_no_request_and_returns_with_its_known_cache(
    tmp_path: Path,
) -> None:
    """A stopped worker among healthy ones gets no new request; requests that wait there move after
    the second failed probe, no client sees an error, and the worker's cache is still known when it
    continues.
    """
    async with running(tmp_path, workers=3, router=QUICK) as stack:
        async with clients(stack) as crowd:
            await stack.until_state(1, "ready")
            with frozen(stack, [1]):

                async def aside() -> bool:
                    return (await stack.row(1))["state"] in ("silent", "ejected", "down")

                await until(aside, "the stopped one to get nothing new")
                await asyncio.sleep(0.1)
                before = len(crowd.workers)
                await stack.until_state(1, "down")

                async def served() -> bool:
                    return len(crowd.workers) >= before + 30

                await until(served, "the others to serve")
                known = (await stack.row(1))["resident_blocks"]
                assert known > 0
            await stack.until_state(1, "ready")
            assert (await stack.row(1))["kv_known"]
        assert crowd.failed == []
        assert "worker 1" in stack.router.log.read_text()
        assert await stack.metric("warmroute_panic") == 0
        await stack.assert_idle()


@contextmanager
def black_hole(address: tuple[str, int]) -> Iterator[None]:
    """Listen at the address with a full backlog, so that new connections are neither accepted nor
    refused.
    """
    with ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(address, backlog=0))
        for _ in range(4):  # Linux takes one more than the backlog
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(hole.getsockname())
        yield


async def test_a_worker_whose_packets_are_dropped_gets_and_fails_no_request(tmp_path: Path) -> None:
    async with AsyncExitStack() as engines, running(tmp_path, workers=0, router=QUICK) as stack:
        first, second, lost = [await engines.enter_async_context(engine()) for _ in range(3)]
        for well in (first, second):
            await stack.add(well.url)
        async with clients(stack, ENGINE_MODEL) as crowd:
            lost_id = await stack.add(lost.url)
            await until_requests_arrive(lost)
            lost.vanish()
            url = URL(lost.url)
            with black_hole((str(url.host), int(url.port or 0))):
                await stack.until_state(lost_id, "down")
                before = len(crowd.workers)

                async def served() -> bool:
                    return len(crowd.workers) >= before + 40

                await until(served, "the others to serve")
        assert crowd.failed == []
        assert str(lost_id) in crowd.workers[:before]
        assert str(lost_id) not in crowd.workers[before:]
        await stack.assert_idle()


async def until_requests_arrive(lost: FailingEngine) -> None:
    async def arrived() -> bool:
        return lost.asked >= 5

    await until(arrived, "it to have its share")


@pytest.mark.parametrize("pause_s", [3.0, pytest.param(8.0, marks=FULL)])
async def test_the_routers_own_pause_is_not_charged_to_workers(
    tmp_path: Path, pause_s: float
) -> None:
    async with running(tmp_path, workers=3, router=QUICK) as stack:
        async with clients(stack) as crowd:
            freeze(stack.router.process.pid)
            await asyncio.sleep(pause_s)
            stack.router.process.send_signal(signal.SIGCONT)

            async def noticed() -> bool:
                return await stack.metric("warmroute_paused_seconds_total") >= pause_s - 0.5

            await until(noticed, "the pause to be noticed")
            await asyncio.sleep(1.0)
            assert {row["state"] for row in await stack.rows()} == {"ready"}
        assert crowd.failed == []
        log = stack.router.log.read_text()
        assert "is silent" not in log
        assert "is down" not in log
        assert await stack.metric("warmroute_ejections_total") == 0
        await stack.assert_idle()


async def test_a_pause_of_the_host_does_not_count_as_a_silence_of_the_worker(
    tmp_path: Path,
) -> None:
    """A pause of the whole host does not count as a worker's silence: the router wakes up before
    its worker, which needs a moment to continue its stream.
    """
    router = [*QUICK, "--timeouts-between-bytes-s", "2"]
    async with running(tmp_path, workers=1, router=router, speed=1) as stack:
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 150, "stream": True}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body) as stream:
            await stream.content.readline()
            with frozen(stack, [0]):
                freeze(stack.router.process.pid)
                await asyncio.sleep(4.0)
                stack.router.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.3)
            assert (await stream.read()).rstrip().endswith(b"data: [DONE]")
        await stack.assert_idle()
