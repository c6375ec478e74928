"""Tests of clients' deadlines with real programs: before an answer, during it, and while a request
is held.
"""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest

from tests.live.faulty_front import faulty
from tests.live.stack import MODEL, Stack, misbehaving, running, until

OWN, ENVOY = "x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def assert_no_worker_is_blamed(stack: Stack) -> None:
    for name in ("worker_failures", "ejections", "retries"):
        assert await stack.metric(f"warmroute_{name}_total") == 0
    await stack.assert_idle()


@pytest.mark.parametrize("name", [OWN, ENVOY])
async def test_a_deadline_that_passes_before_an_answer_is_504_and_stops_the_worker(
    tmp_path: Path, name: str
) -> None:
    async with (
        running(tmp_path, workers=1) as stack,
        faulty(stack.workers[0].url, stack.http) as it,
    ):
        await stack.remove(0)
        await stack.add(it.url)
        it.harm = "silent"
        for stream in (False, True):
            body = {"model": MODEL, "prompt": [1], "stream": stream}
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers={name: "150"}) as reply:
                assert reply.status == 504
                assert (await reply.json())["error"]["code"] == "deadline_exceeded"

        async def hung_up() -> bool:
            return it.left == 2

        await until(hung_up, "the worker's connections to be closed")
        assert 'error="deadline_exceeded"' in await exposition(stack)
        it.harm = "none"
        assert (await stack.complete([1], headers={name: "20000"}))[0] == 200
        await assert_no_worker_is_blamed(stack)


async def test_a_deadline_cuts_a_begun_answer_so_that_it_does_not_look_complete(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=1, speed=1) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 2_000, "stream": True}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body, headers={OWN: "600"}) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()
        await assert_no_worker_is_blamed(stack)


async def test_a_held_request_is_refused_when_its_deadline_passes(tmp_path: Path) -> None:
    holding = ["--policy", "tests.live.holding:hold_all"]
    async with running(tmp_path, workers=1, router=holding) as stack:
        status, answer = await stack.complete([1], headers={OWN: "100"})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        await assert_no_worker_is_blamed(stack)


async def test_the_routers_own_total_timeout_holds_without_a_clients_deadline(
    tmp_path: Path,
) -> None:
    router = ["--policy", "tests.live.holding:hold_all", "--timeouts-total-s", "0.1"]
    async with running(tmp_path, workers=1, router=router) as stack:
        for headers in ({}, {OWN: "0"}, {OWN: "60000"}):
            status, answer = await stack.complete([1], headers=headers)
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_worker_gets_the_remaining_time_and_an_invalid_deadline_gets_400(
    tmp_path: Path,
) -> None:
    heads: list[bytes] = []
    async with running(tmp_path, workers=0) as stack, misbehaving(OK, heads=heads) as (url, _):
        await stack.add(url)
        await stack.complete([1], headers={OWN: "5000", ENVOY: "9000"})
        await stack.complete([1])
        told = [re.findall(rb"(?im)^(x-[a-z-]*timeout-ms): (\d+)\r$", head) for head in heads]
        ((name, left_ms),) = told[0]
        assert name == OWN.encode()
        assert 0 < int(left_ms) <= 5000
        assert told[1] == []
        status, answer = await stack.complete([1], headers={OWN: "soon"})
        assert (status, answer["error"]["param"]) == (400, OWN)


async def exposition(stack: Stack) -> str:
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        return await reply.text()
