"""Reads what a router believes about its workers' caches, and relays events over a line that can be
cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.live.ports import lasting_port
from tests.live.slow_line import SlowLine
from tests.live.stack import MODEL, Stack, until
from tests.told_decision import decision_in


async def explained(stack: Stack, prompt: list[int], model: str = MODEL) -> dict[str, Any]:
    """Send a completion; return the cached tokens that the router expected and that the
    worker had.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    headers = {"x-warmroute-explain": "1"}
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers=headers) as reply:
        usage = (await reply.json())["usage"]
        explanation = decision_in(reply.headers["x-warmroute-explain"])
    return {
        "worker": explanation["worker"],
        "expected": explanation["expected_hit_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def until_resident(stack: Stack, worker_id: int, blocks: int) -> None:
    async def reached() -> bool:
        return bool((await stack.row(worker_id)).get("resident_blocks", -1) >= blocks)

    await until(reached, f"worker {worker_id} to hold {blocks} blocks")


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def cut_line(port: int) -> AsyncIterator[tuple[int, Callable[[bool], Awaitable[None]]]]:
    """Relay TCP to `port`; yield the relay's port and a function that cuts the connection (False)
    or restores it (True).
    """
    line = SlowLine(port, 0.0)
    begin = lasting_port()
    server = await asyncio.start_server(line.serve, "127.0.0.1", begin)

    async def set_up(up: bool) -> None:
        nonlocal server
        server.close()
        await line.aclose()
        if up:
            server = await asyncio.start_server(line.serve, "127.0.0.1", begin)

    try:
        yield begin, set_up
    finally:
        await set_up(False)
