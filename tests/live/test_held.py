"""Tests of held requests with real programs: clients that leave, deadlines, shutdown, a failing
policy.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.live.stack import MODEL, Stack, running, until

HOLDING = ["--policy", "tests.live.holding:hold_all"]


async def held(stack: Stack, count: int) -> None:
    async def reached() -> bool:
        return await stack.metric("warmroute_held_requests") == count

    await until(reached, f"{count} requests to be held")


async def test_a_client_that_disconnects_while_held_leaves_no_request(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, router=HOLDING) as stack:
        asking = [asyncio.create_task(stack.complete([n])) for n in range(3)]
        await held(stack, 3)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await held(stack, 0)
        await stack.assert_idle()


async def test_a_held_request_is_refused_after_the_hold_limit(tmp_path: Path) -> None:
    router = [*HOLDING, "--limits-hold-s", "0.3", "--limits-hold-requests", "2"]
    async with running(tmp_path, workers=1, router=router) as stack:
        asking = [asyncio.create_task(stack.complete([n])) for n in range(2)]
        await held(stack, 2)
        status, answer = await stack.complete([9])
        assert (status, answer["error"]["code"]) == (503, "hold_queue_full")
        for status, answer in await asyncio.gather(*asking):
            assert (status, answer["error"]["code"]) == (503, "hold_timeout")
        await stack.assert_idle()


async def test_shutdown_ends_in_time_despite_held_requests_and_running_streams(
    tmp_path: Path,
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: round_robin\ntimeouts:\n  shutdown_s: 1\n")
    async with running(tmp_path, workers=1, router=["--config", str(file)], speed=1) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 4000, "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            await reply.content.readline()
            file.write_text(file.read_text().replace("round_robin", HOLDING[1]))
            stack.router.process.send_signal(signal.SIGHUP)

            async def reloaded() -> bool:
                return "reloaded; changed: policy" in stack.router.log.read_text()

            await until(reloaded, "the holding policy")
            waiting = asyncio.create_task(stack.complete([2]))
            await held(stack, 1)
            stack.router.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(stack.router.process.wait(), 10) == 0
            with pytest.raises(aiohttp.ClientError):  # the client sees that the answer was cut off
                await reply.read()
        status, answer = await waiting  # it was sent to no worker, so another router may take it
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert "Traceback" not in stack.router.log.read_text()


async def test_each_reload_logs_the_keys_that_it_cannot_change(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: round_robin\n")
    async with running(tmp_path, workers=1, router=["--config", str(file)]) as stack:
        file.write_text("policy: round_robin\nlimits:\n  hold_requests: 5\n")
        for times in (1, 2):
            stack.router.process.send_signal(signal.SIGHUP)

            async def logged(times: int = times) -> bool:
                return stack.router.log.read_text().count("limits.hold_requests") == times

            await until(logged, f"the refusal, {times} times")


async def test_a_models_limit_holds_over_all_workers_and_excess_requests_wait(
    tmp_path: Path,
) -> None:
    """A model's limit holds over both workers together: other requests wait by priority, within
    their time limits, until a reload lifts the limit.
    """
    file = tmp_path / "router.yaml"
    limit = f'["{MODEL}:max_requests=2"]'
    file.write_text(f"model_limits: {limit}\nlimits:\n  hold_requests: 3\n")
    async with running(tmp_path, router=["--config", str(file)], speed=1) as stack:
        path = f"{stack.url}/v2/models/{MODEL}/infer"

        async def infer(prompt: str, **parameters: int) -> tuple[int, str, str, str]:
            """Ask for one token; return (status, Retry-After, error, milliseconds held)."""
            texts = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}
            most = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [1]}
            body = {"inputs": [texts, most], "parameters": parameters}
            async with stack.http.post(path, json=body) as reply:
                answer = await reply.json()
                order.append(prompt)
                after = reply.headers.get("Retry-After", "")
                held_ms = reply.headers.get("x-warmroute-held-ms", "")
                return reply.status, after, answer.get("error", ""), held_ms

        order: list[str] = []
        body = {"model": MODEL, "prompt": [1], "max_tokens": 4_000, "stream": True}
        streams = [await stack.http.post(f"{stack.url}/v1/completions", json=body) for _ in "ab"]
        for stream in streams:
            await stream.content.readline()
        waiting = [asyncio.create_task(infer("late"))]
        await held(stack, 1)
        waiting.append(asyncio.create_task(infer("first", priority=1)))
        await held(stack, 2)
        status, after, error, _ = await infer("brief", timeout=200_000)
        assert status == 503
        assert error.startswith("Request timeout expired: ")
        assert error.endswith("within 0.2 s: the model's limit of 2 requests is reached")
        assert int(after) >= 1
        waiting.append(asyncio.create_task(infer("any")))
        await held(stack, 3)
        status, after, error, _ = await infer("beyond")
        assert (status, error[:26]) == (503, "Exceeds maximum queue size")
        assert int(after) >= 1
        assert await stack.metric("warmroute_worker_requests") == 2
        streams.pop().close()  # one of two clients leaves, and the others are answered in turn
        await held(stack, 0)
        answers = [(status, int(ms) >= 0) for status, *_, ms in await asyncio.gather(*waiting)]
        assert answers == [(200, True)] * 3
        assert order == ["brief", "beyond", "first", "late", "any"]
        third = await stack.http.post(f"{stack.url}/v1/completions", json=body)
        await third.content.readline()
        waiting = [asyncio.create_task(infer("again"))]
        await held(stack, 1)
        file.write_text("limits:\n  hold_requests: 3\n")
        stack.router.process.send_signal(signal.SIGHUP)
        assert (await asyncio.gather(*waiting))[0][0] == 200
        assert "reloaded; changed: model_limits" in stack.router.log.read_text()
        for stream in (*streams, third):
            stream.close()
        await stack.assert_idle()
