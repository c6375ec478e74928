"""A router that stops: those that wait for a worker get an answer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.live.stack import MODEL, running, until


async def test_requests_that_wait_are_turned_away_when_the_router_stops(tmp_path: Path) -> None:
    policy = ["--policy", "tests.live.holding:hold_all", "--timeouts-shutdown-s", "5"]
    async with running(tmp_path, workers=1, router=policy) as stack:
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1}
        url = f"{stack.url}/v1/completions"
        asking = [asyncio.ensure_future(stack.http.post(url, json=body)) for _ in range(3)]

        async def wait() -> bool:
            return await stack.metric("warmroute_held_requests") == len(asking)

        await until(wait, "the requests to wait")
        stack.router.process.send_signal(signal.SIGTERM)
        for reply in await asyncio.gather(*asking):
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "1"
            assert (await reply.json())["error"]["code"] == "shutting_down"
        assert await stack.router.process.wait() == 0


async def test_nothing_of_the_native_code_outlives_the_router(tmp_path: Path) -> None:
    """Its library looks for that at the end, and says so in the log."""
    async with running(tmp_path, workers=1) as stack:
        assert [(await stack.complete([n] * 40))[0] for n in range(4)] == [200] * 4
        stack.router.process.send_signal(signal.SIGTERM)
        assert await stack.router.process.wait() == 0
        assert "leaked" not in stack.router.log.read_text()
