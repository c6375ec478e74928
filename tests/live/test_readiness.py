"""Tests of readiness: of the workers, of each model, and of a router that an operator takes out of
service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.live.stack import MODEL, Stack, running, until


async def ask(stack: Stack, url: str, path: str) -> tuple[int, Any]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"{url}{path}") as reply,
    ):
        return reply.status, await reply.json()


async def post(stack: Stack, path: str) -> tuple[int, Any]:
    async with stack.http.post(f"{stack.admin}{path}") as reply:
        return reply.status, await reply.json()


async def until_status(stack: Stack, path: str, status: int) -> None:
    async def has_status() -> bool:
        return (await ask(stack, stack.url, path))[0] == status

    await until(has_status, f"GET {path} to say {status}")


@asynccontextmanager
async def routed(folder: Path, *router: str) -> AsyncIterator[Stack]:
    async with running(folder, router=list(router)) as stack:
        await until_status(stack, "/ready", 200)
        yield stack


async def test_ready_is_200_as_long_as_a_worker_of_the_model_takes_requests(tmp_path: Path) -> None:
    async with routed(tmp_path, "--waiting-wait-s", "0") as stack:
        for url in (stack.url, stack.admin):
            status, answer = await ask(stack, url, f"/ready?model={MODEL}")
            assert (status, answer["reasons"]) == (200, [])
            assert answer["ready_workers_by_model"] == {MODEL: 2}
            status, answer = await ask(stack, url, "/ready?model=other")
            assert (status, answer["reasons"]) == (503, ["no worker serves the model 'other'"])
        assert (await ask(stack, stack.url, f"/ready?model={'m' * 2000}"))[0] == 400
        await post(stack, "/workers/0/drain")
        await until_status(stack, f"/ready?model={MODEL}", 200)
        await post(stack, "/workers/1/drain")
        await until_status(stack, f"/ready?model={MODEL}", 503)
        await until_status(stack, "/ready", 503)
        await until_status(stack, "/health", 200)
        assert (await stack.complete([1]))[0] == 503
        status, shown = await post(stack, "/workers/1/undrain")
        assert (status, shown["state"]) == (200, "ready")
        await until_status(stack, "/ready", 200)
        assert (await stack.complete([1]))[0] == 200
        url = stack.workers[0].url
        status, shown = await post(stack, f"/workers/undrain?url={url}")
        assert (status, [row["state"] for row in shown["workers"]]) == (200, ["ready"])


async def test_a_draining_router_is_not_ready_but_serves_requests(tmp_path: Path) -> None:
    async with routed(tmp_path) as stack:
        status, answer = await post(stack, "/drain")
        assert (status, answer["reasons"]) == (200, ["the router is draining"])
        assert (await ask(stack, stack.admin, "/ready"))[0] == 503
        await until_status(stack, "/ready", 503)
        for n in range(6):
            assert (await stack.complete([n]))[0] == 200
        status, answer = await post(stack, "/undrain")
        assert (status, answer["ready"]) == (200, True)
        await until_status(stack, "/ready", 200)


async def test_a_draining_router_refuses_requests_with_drain_refuses(tmp_path: Path) -> None:
    async with routed(tmp_path, "--drain-refuses", "true") as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 100, "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as stream:
            await stream.content.readline()
            await post(stack, "/drain")
            for n in range(6):
                status, answer = await stack.complete([n])
                assert (status, answer["error"]["code"]) == (503, "draining")
            assert b"data: [DONE]" in await stream.read()
        assert await stack.metric('warmroute_rejections_total{code="draining"}') == 6
        await post(stack, "/undrain")
        assert (await stack.complete([1]))[0] == 200
        await stack.assert_idle()


async def test_undrain_is_refused_for_a_worker_that_is_being_removed(tmp_path: Path) -> None:
    async with running(tmp_path, speed=1) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 100, "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as stream:
            await stream.content.readline()
            worker = stream.headers["x-warmroute-worker"]
            async with stack.http.delete(f"{stack.admin}/workers/{worker}") as reply:
                assert reply.status == 202
            status, answer = await post(stack, f"/workers/{worker}/undrain")
            assert (status, answer["error"]["code"]) == (409, "worker_leaving")
            assert b"data: [DONE]" in await stream.read()
