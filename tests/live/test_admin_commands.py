"""Tests of `warmroute workers` and `warmroute top` against a running router."""

from __future__ import annotations

import re
from pathlib import Path

from tests.live.commands import output_of
from tests.live.stack import Stack, running


async def run(stack: Stack | None, *arguments: str, admin: str = "") -> tuple[int, str]:
    url = admin or (stack.admin if stack is not None else "")
    return await output_of(*arguments, "--admin", url)


async def test_the_workers_command_lists_drains_undrains_removes_and_adds_workers(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as stack:
        first, second = (worker.url for worker in stack.workers)
        status, said = await run(stack, "workers")
        assert (status, said.count("ready"), second in said) == (0, 2, True)
        assert re.search(rf"0 +ready +0  configuration  {first}$", said, re.MULTILINE), said
        status, said = await run(stack, "workers", "drain", "0")
        assert (status, "draining" in said) == (0, True)
        status, said = await run(stack, "workers", "undrain", first)
        assert (status, "ready" in said) == (0, True)
        assert (await run(stack, "workers", "remove", "1", "--force"))[0] == 0
        assert [row["id"] for row in await stack.rows()] == [0]
        assert (await run(stack, "workers", "add", second))[0] == 0
        await stack.until_state(2, "ready")
        status, said = await run(stack, "workers")
        assert re.search(rf"2 +ready +0  admin request  {second}$", said, re.MULTILINE), said
        status, said = await run(stack, "workers", "drain", "77")
        assert (status, "there is no worker '77'" in said) == (1, True)
        status, said = await run(stack, "workers", "drain")
        assert (status, "needs a worker" in said) == (1, True)


async def test_top_prints_a_frame_and_reports_errors(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        await stack.complete([1] * 40)
        status, said = await run(stack, "top", "--once")
        assert status == 0, said
        assert "workers 2: 2 ready" in said
        assert "request worker" in said
        status, said = await run(stack, "top", "--once", admin=stack.url)
        assert (status, "give the admin port's address" in said) == (1, True)
    status, said = await run(None, "top", "--once", admin="http://127.0.0.1:9")
    assert (status, "is the router there?" in said) == (1, True)
    status, said = await run(None, "top", admin="nonsense")
    assert (status, "is no URL" in said) == (1, True)
