"""Tests of Envoy, the picker and workers while one of them dies, hangs, stops or leaves: no charge
remains, and no incomplete answer looks complete.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from router.picker.messages import PROCESS
from simulator.live.processes import Program
from tests.certs import Authority
from tests.effort import QUICK
from tests.engines.echo_worker import EVENTS, MODEL, EchoWorker, echo_worker, event
from tests.engines.envoy import (
    ENVOY,
    Envoy,
    cluster_of,
    duplex,
    picker_of,
    running_envoy,
    tls_to_picker,
)
from tests.live.ports import lasting_port
from tests.live.stack import Stack, running, until
from tests.router.picker.picker_messages import message

ORIGINAL_DST, OVERRIDE_HOST = "original-dst.yaml", "override-host.yaml"
PATH = "/v1/completions"
REQUESTS = 1_500 if QUICK else 10_000
AT_ONCE = 32
WHOLE = b"".join(map(event, range(EVENTS))) + b"data: [DONE]\n\n"
ROUTER = ("--picker-decision-s", "2", "--intervals-health-s", "0.5", "--slow-start-s", "0")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    ENVOY.or_skip()


def body_of(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **more}).encode()


@asynccontextmanager
async def pool(folder: Path, *flags: str, count: int = 2) -> AsyncIterator[tuple[Stack, Any, str]]:
    """Yield a router whose picker port stays the same after a restart, its workers, and the
    picker's address.
    """
    place = f"127.0.0.1:{lasting_port()}"
    async with AsyncExitStack() as all_of:
        workers = [await all_of.enter_async_context(echo_worker()) for _ in range(count)]
        more = ["--picker-port", place.rpartition(":")[2], *ROUTER, *flags]
        for one in workers:
            more += ["--worker", f"{one.url},kind=openai,model={MODEL}"]
        stack = await all_of.enter_async_context(running(folder, workers=0, router=more))
        for worker_id in range(count):
            await stack.until_state(worker_id, "ready")
        yield stack, workers, place


async def restart_router(stack: Stack, workers: list[EchoWorker], place: str) -> Stack:
    """Start a router like the one that was killed, with the same picker port."""
    arguments = ["serve", "--port", "0", "--admin-port", "0", *ROUTER]
    arguments += ["--picker-port", place.rpartition(":")[2]]
    for one in workers:
        arguments += ["--worker", f"{one.url},kind=openai,model={MODEL}"]
    program: Program = await stack.programs.start("next", "router", arguments)
    following = Stack(stack.programs, program, [], stack.http)
    for worker_id in range(len(workers)):
        await following.until_state(worker_id, "ready")
    return following


async def status_and_body(envoy: Envoy, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Send a completion request through Envoy; return (status, body)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with envoy.http.post(f"{envoy.url}{PATH}", data=body, headers=named) as reply:
        return reply.status, await reply.read()


def _no_change(config: Any) -> None:
    """Leave the bootstrap as it is."""


async def disconnect_early(envoy: Envoy, draw: random.Random) -> None:
    """Send a request as a client that disconnects before or during the answer."""
    what = draw.choice(("events", "hang"))
    with suppress(TimeoutError):
        async with asyncio.timeout(draw.uniform(0.001, 0.15)):
            await status_and_body(envoy, body_of("a", stream=True), x_do=what)


async def break_off_stream(place: str, draw: random.Random) -> None:
    """Call the picker as a proxy that resets its stream at any point, or sends messages out of
    order.
    """
    said = [
        message("request_headers", pairs=[(":path", PATH), (":method", "POST")]),
        message("request_body", body=body_of("a"), end_of_stream=True),
        message("response_headers"),
        message("response_body", body=b"data: 1\n\n"),
    ]
    if draw.random() < 0.3:
        draw.shuffle(said)
    async with grpc.aio.insecure_channel(place) as channel:
        call = channel.stream_stream(PROCESS)()
        for one in said[: draw.randint(1, 4)]:
            await call.write(one)
        if draw.random() < 0.5:
            with suppress(TimeoutError):
                await asyncio.wait_for(call.read(), draw.uniform(0.0, 0.05))
        call.cancel()


@pytest.mark.alone
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("file", "change"),
    [
        pytest.param(ORIGINAL_DST, _no_change, id="original-dst"),
        pytest.param(OVERRIDE_HOST, duplex, id="override-host-duplex"),
    ],
)
async def test_under_faults_no_charge_is_left_and_no_answer_is_empty(
    tmp_path: Path, file: str, change: Any
) -> None:
    draw, statuses = random.Random(24), Counter[int]()
    async with AsyncExitStack() as all_of:
        flags = ("--picker-endpoints", "1" if file == ORIGINAL_DST else "3")
        stack, workers, place = await all_of.enter_async_context(pool(tmp_path, *flags, count=3))
        engines = [one.address for one in workers]
        dead = f"127.0.0.1:{lasting_port()}"
        envoy = await all_of.enter_async_context(
            running_envoy(tmp_path, file, [place], [*engines, dead], change)
        )
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                if number % 5 == 0:
                    await disconnect_early(envoy, draw)
                elif number % 25 == 1:
                    await break_off_stream(place, draw)
                elif number % 25 == 2:
                    status, data = await status_and_body(envoy, b"{", x_do="echo")
                    statuses[status] += 1
                    assert status != 200 or data == b"{"
                else:
                    body = body_of(f"{number % 40} " * 30, stream=bool(number % 2))
                    what = "events" if number % 2 else "echo"
                    status, data = await status_and_body(envoy, body, x_do=what, x_pause_s="0.001")
                    statuses[status] += 1
                    if status == 200:
                        assert data == (WHOLE if number % 2 else body)

        async def dies() -> None:
            """Add an endpoint without a server to the router again and again, and remove it 0.3 s
            later.
            """
            while True:
                spec = f"http://{dead},kind=openai,model={MODEL}"
                async with stack.http.post(f"{stack.admin}/workers", json=spec) as reply:
                    worker_id = (await reply.json())["id"]
                await asyncio.sleep(0.3)
                await stack.remove(worker_id)

        dying = asyncio.create_task(dies())
        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(one(number))
        dying.cancel()
        await asyncio.wait((dying,))
        print("statuses", dict(statuses))
        await stack.assert_idle()
        assert await stack.metric("warmroute_picker_streams") == 0
        assert await stack.metric("warmroute_internal_errors_total") == 0
        answered = statuses[200] + statuses[400]
        assert answered > 0.95 * statuses.total(), statuses


@pytest.mark.alone
@pytest.mark.parametrize("file", [ORIGINAL_DST, OVERRIDE_HOST])
async def test_envoy_follows_its_failure_mode_while_the_picker_is_down(
    tmp_path: Path, file: str
) -> None:
    """While the picker is down, Envoy with failure mode closed refuses requests; with failure mode
    open, it balances them itself once it knows.
    """
    async with AsyncExitStack() as all_of:
        stack, workers, place = await all_of.enter_async_context(pool(tmp_path))
        engines = [one.address for one in workers]
        envoy = await all_of.enter_async_context(running_envoy(tmp_path, file, [place], engines))
        ends: list[tuple[float, int]] = []
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                body, what = body_of(f"{number} " * 40), ("echo", "events")[number % 2]
                try:
                    status, data = await status_and_body(envoy, body, x_do=what)
                except aiohttp.ClientError:  # the client sees that the answer was cut off
                    status, data = 0, b""
                assert status != 200 or data == (WHOLE if number % 2 else body)
                ends.append((time.monotonic(), status))

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(client(number))
            await until(_so_many(ends, 100), "a hundred answers", 60)
            assert {status for _, status in ends} == {200}
            stack.router.process.send_signal(signal.SIGKILL)
            await envoy.until_healthy(healthy=0)
            known_s = time.monotonic()
            await until(_so_many(ends, 50, known_s + 1.0), "answers without it", 60)
            since = {status for at_s, status in ends if at_s > known_s + 1.0}
            following = await restart_router(stack, workers, place)
            await envoy.until_healthy()
            back_s = time.monotonic()
            await until(_so_many(ends, 50, back_s + 1.0), "answers with the next one", 60)
            over.set()
        await following.assert_idle()
        assert {status for at_s, status in ends if at_s > back_s + 1.0} == {200}
        assert since == ({200} if file == OVERRIDE_HOST else {503})


def _so_many(ends: list[tuple[float, int]], count: int, after_s: float = 0.0) -> Any:
    async def there() -> bool:
        return sum(at_s > after_s for at_s, _ in ends) >= count

    return there


async def test_a_hanging_picker_costs_one_message_timeout(tmp_path: Path) -> None:
    limit_s = 1.0

    def change(config: Any) -> None:
        picker_of(config)["message_timeout"] = f"{limit_s}s"
        del cluster_of(config, "picker")["health_checks"]

    async with pool(tmp_path) as (stack, _, place):
        found = running_envoy(tmp_path, ORIGINAL_DST, [place], change=change)
        async with found as envoy:
            assert (await status_and_body(envoy, body_of("a")))[0] == 200
            stack.router.process.send_signal(signal.SIGSTOP)
            try:
                for _ in range(3):
                    began_s = time.monotonic()
                    status, _ = await status_and_body(envoy, body_of("a"))
                    took_s = time.monotonic() - began_s
                    assert status in (503, 504)
                    assert took_s < limit_s + 0.1
            finally:
                stack.router.process.send_signal(signal.SIGCONT)
            assert (await status_and_body(envoy, body_of("a")))[0] == 200
            await stack.assert_idle()


@pytest.mark.parametrize("change", [_no_change, duplex], ids=["buffered", "duplex"])
async def test_a_stopping_picker_lets_streams_finish(tmp_path: Path, change: Any) -> None:
    async with pool(tmp_path) as (stack, workers, place):
        found = running_envoy(tmp_path, ORIGINAL_DST, [place], change=change)
        async with found as envoy:
            running_on = asyncio.create_task(
                status_and_body(envoy, body_of("a", stream=True), x_do="events", x_pause_s="0.1")
            )

            async def there() -> bool:
                return any(one.heads for one in workers)

            await until(there, "the stream to be at its worker")
            stack.router.process.send_signal(signal.SIGTERM)
            assert await running_on == (200, WHOLE)
            assert await asyncio.wait_for(stack.router.process.wait(), 10) == 0
            assert (await status_and_body(envoy, body_of("a")))[0] == 503


async def test_envoy_connects_to_the_picker_with_tls(tmp_path: Path) -> None:
    pair = Authority(tmp_path).signed("picker")
    flags = ("--picker-tls-cert", str(pair.cert), "--picker-tls-key", str(pair.key))

    async with pool(tmp_path, *flags) as (stack, _, place):
        found = running_envoy(tmp_path, ORIGINAL_DST, [place], change=tls_to_picker)
        async with found as envoy:
            body = body_of("a" * 10_000)
            assert await status_and_body(envoy, body) == (200, body)
            await stack.assert_idle()
