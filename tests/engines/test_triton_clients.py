"""One script of Triton's own clients, before a real server and through the router: field by field
the same, but for ids and times.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from simulator import CHECKOUT
from tests.engines.pool import Pool
from tests.engines.triton_server import TritonServer

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT = "tests.engines.triton_clients_script"
ENDS_S = 100.0
LEAST = 200  # results


async def results(url: str, grpc: str, *more: str) -> dict[str, Any]:
    """What the script got, by name."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", SCRIPT, url.removeprefix("http://"), grpc, *more),
        cwd=CHECKOUT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ENDS_S):
            told, said = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert program.returncode == 0, said.decode()[-4_000:]
    rows = json.loads(told.splitlines()[-1])
    found = dict(map(tuple, rows))
    assert len(found) == len(rows), "two results have one name"
    return found


async def test_each_call_gives_what_the_server_itself_gives(triton: Pool) -> None:
    server = triton.servers[0]
    assert isinstance(server, TritonServer)
    direct = await results(server.url, server.grpc)
    router = triton.router.url, triton.router.router.facts["grpc"]
    routed = await results(*router)
    assert list(routed) == list(direct)
    assert len(direct) > LEAST
    unlike = [name for name in direct if routed[name] != direct[name]]
    assert not unlike, "\n".join(f"{one}: {routed[one]} != {direct[one]}" for one in unlike)
    assert await triton.router.metric("warmroute_inflight_requests") == 0

    # What Triton itself cannot have on one stream the router can: each request has its own there.
    each = direct["grpc: stream, many at once"] | direct["grpc: stream, whole at once"]
    assert await results(*router, "mixed") == each
