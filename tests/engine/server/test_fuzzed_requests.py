"""Tests of random requests from a seed, at a simulated worker and at one that computes: each is
answered once, nothing hangs, no answer is an internal error, and all blocks come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from itertools import islice
from pathlib import Path

import aiohttp
import pytest

from engine.model.tiny import make_tiny
from engine.scheduler.types import SchedulerSettings
from tests.effort import EFFORT
from tests.engine.harness import Running, eventually, running
from tests.engine.real import computing, loaded
from tests.engine.server.hostile_bodies import FuzzedRequest, broken, requests
from tests.oracles.block_pool import check_pool

SLICE = 1_000
LONG = 2_000 * EFFORT
AT_ONCE = 8
ANSWER_S = 60.0  # a machine that runs other tests, too; nothing here takes a second by itself
LOOK_S = 0.02  # for an answer, before a client that sent half a request goes away
SEEDS = [1, pytest.param(2, marks=[pytest.mark.full, pytest.mark.timeout(1_800)])]


def how_many(seed: int) -> int:
    return SLICE if seed == 1 else LONG


@contextlib.asynccontextmanager
async def worker_of_kind(kind: str, tmp_path: Path):
    """Yield a worker of this kind (simulated or computing) with few blocks, so that requests wait
    for each other.
    """
    if kind == "timed":
        settings = SchedulerSettings(pinned_share=0.2, tenant_share=0.5, max_queue=64)
        async with running(speed=1e5, kv_tokens=2_048, scheduler=settings) as worker:
            yield worker
        return
    make_tiny(tmp_path)
    model = loaded(tmp_path, kv_tokens=1_024, max_batch_size=8, max_num_tokens=64)
    try:
        async with computing(model) as worker:
            yield worker
    finally:
        model.model.close()


async def ask(worker: Running, asked: FuzzedRequest) -> int:
    """Send a request; return the status of its only answer, which must be complete."""
    async with asyncio.timeout(ANSWER_S):
        url = worker.url + asked.path
        async with worker.http.post(url, data=asked.body, headers=asked.headers) as reply:
            body = await reply.read()
    if reply.status != 200:
        assert reply.status in (400, 404, 409, 503, 504), (asked, reply.status, body)
        json.loads(body)
    elif reply.content_type == "text/event-stream":
        ends_well = body.endswith(b"data: [DONE]\n\n") or b'"error"' in body
        assert ends_well or "/v2/" in asked.path, (asked, body)
    elif reply.content_type == "application/json" and body:
        json.loads(body)
    return reply.status


async def assert_idle_and_serving(worker: Running) -> None:
    """Assert that no request and no block is left behind and that the next client is served as
    usual.
    """
    scheduler = worker.worker.runner.scheduler
    await eventually(lambda: not scheduler.requests, "all requests are over")
    assert worker.worker.unfinished == 0
    for pin in scheduler.pins.all:
        scheduler.pins.unpin(pin.name)
    await eventually(lambda: scheduler.kv_used_blocks == 0, "all blocks are given back")
    check_pool(worker.worker.pool)
    status, answer = await worker.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["timed", "computing"])
async def test_hostile_values_are_answered_once(
    kind: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with worker_of_kind(kind, tmp_path) as worker:
        made = requests(random.Random(seed), worker.worker.model)
        statuses: set[int] = set()
        left = how_many(seed)
        while left > 0:
            several = list(islice(made, min(left, AT_ONCE)))
            left -= len(several)
            statuses |= set(await asyncio.gather(*(ask(worker, one) for one in several)))
        assert {200, 400, 404} <= statuses, "requests of all sorts were made"
        await assert_idle_and_serving(worker)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_broken_bytes_do_not_break_the_worker(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with worker_of_kind("timed", tmp_path) as worker:
        host, port = worker.url.removeprefix("http://").split(":")

        async def send(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        return await reader.readexactly(12)
                writer.write_eof()
                async with asyncio.timeout(ANSWER_S):
                    return await reader.read()
            except (ConnectionError, asyncio.IncompleteReadError):
                return b""
            finally:
                writer.close()

        made = broken(random.Random(seed), worker.worker.model)
        answers: set[bytes] = set()
        for _ in range(how_many(seed) // AT_ONCE):
            found = await asyncio.gather(*map(send, islice(made, AT_ONCE)))
            answers |= {one[9:12] for one in found}
        assert {b"200", b"400"} <= answers
        assert b"500" not in answers
        assert worker.worker.counters.unread_requests > 0, "counted, and not logged: see below"
        await assert_idle_and_serving(worker)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("path", "expect", "status"),
    [
        ("/v1/completions", b"100-continue", b"100"),
        ("/v1/completions", b"\xba", b"417"),
        ("/nowhere", b"\xba", b"417"),
    ],
)
async def test_an_unknown_expect_header_gets_417(path: str, expect: bytes, status: bytes) -> None:
    async with running() as worker:
        host, port = worker.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "hi", "max_tokens": 1}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: %s\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (path.encode(), expect, len(body)))
        assert (await reader.readline()).split()[1] == status
        if status == b"100":
            await reader.readline()
            writer.write(body)
            assert (await reader.readline()).split()[1] == b"200"
        writer.close()


async def test_the_fuzzer_notices_a_server_error(tmp_path: Path) -> None:
    async with worker_of_kind("timed", tmp_path) as worker:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        worker.worker.start = fail  # type: ignore[method-assign]
        good = FuzzedRequest("/v1/completions", b'{"prompt": "hi"}')
        with pytest.raises((AssertionError, aiohttp.ClientError)):
            await ask(worker, good)
