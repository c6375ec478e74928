"""Tests of the page of a router that shares state: which replicas are present, and what is known of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.live.redis_server import needs_redis, redis_server
from tests.live.stack import Stack, running, until

pytestmark = needs_redis


async def replicas(stack: Stack) -> list[dict[str, Any]]:
    async with stack.http.get(f"{stack.admin}/ui/state") as reply:
        assert reply.status == 200
        rows: list[dict[str, Any]] = (await reply.json())["frame"]["replicas"]
        return rows


async def test_replicas_are_shown_and_marked_as_stale(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        shared = ["--state", server.url, "--replicas-name"]
        async with running(tmp_path, workers=1, router=[*shared, "one"]) as stack:
            ports = ["--port", "0", "--admin-port", "0", "--worker", stack.workers[0].url]
            arguments = ["serve", *ports, *shared, "two"]
            await stack.programs.start("two", "router", arguments)

            async def known() -> bool:
                rows = await replicas(stack)
                return len(rows) == 2 and rows[1]["state"] == "all known"

            await until(known, "the other router to be shown")
            own, other = await replicas(stack)
            assert own["name"].startswith("one@")
            assert own["name"].endswith("(this router)")
            assert own["state"] == "link up"
            assert other["name"].startswith("two@")
            assert (other["requests"], other["differs_in"]) == (0, [])
            server.kill()

            async def stale() -> bool:
                rows = await replicas(stack)
                return [row["state"].split()[0] for row in rows] == ["link", "stale,"]

            await until(stale, "the page to say that what it knows is old")
            assert "link down for" in (await replicas(stack))[0]["state"]


async def test_a_single_router_shows_no_replicas(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        assert await replicas(stack) == []
