"""Tests of real vLLM servers that are killed: other servers continue the streams, requests succeed,
and the index stays correct.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.engines.pool import Pool
from tests.engines.streamed import TOKENS, stream
from tests.engines.traffic import requests
from tests.engines.vllm_server import Server
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAMS = 12
HELD = "warmroute_holds_total"


def engine_core(server: Server) -> int:
    """Return the process id of the server's engine core, the process that computes."""
    assert server.process is not None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.path.exists(entry / "stat"):
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                name = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == server.process.pid and b"resource_tracker" not in name:
                return int(entry.name)
    raise AssertionError("no engine core")


@pytest.mark.parametrize("what", ["server", pytest.param("engine core", marks=pytest.mark.full)])
async def test_streams_and_requests_survive_kill_9(vllm: Pool, what: str) -> None:
    streams = [asyncio.create_task(stream(vllm, serial)) for serial in range(STREAMS)]

    async def busiest() -> tuple[int, int]:
        """Return (running requests, worker id) of the busiest worker."""
        rows = await vllm.router.rows()
        return max((r["inflight_requests"] if r["context_tokens"] else 0, r["id"]) for r in rows)

    async def under_way() -> bool:
        for one in streams:
            if one.done():  # too early; this says why, or that it waited at the router
                raise AssertionError(f"{one.result()}, held: {await vllm.router.metric(HELD)}")
        return (await busiest())[0] >= STREAMS // 2

    await until(under_way, "streams at the server that is to die")
    _, at = await busiest()
    victim = vllm.servers[at]
    if what == "server":
        await victim.kill()
    else:
        os.kill(engine_core(victim), signal.SIGKILL)
    statuses = [(await vllm.ask(p, b))[0] for p, b in requests(seed=50, count=20)]
    ended = await asyncio.gather(*streams)
    try:
        assert statuses == [200] * 20
        assert ended == [(["length"], TOKENS)] * STREAMS
    finally:
        await victim.stop()
        await victim.start()
        await victim.until_healthy()
    await vllm.router.until_state(at, "ready")
    for path, body in requests(seed=51, count=30):
        assert (await vllm.ask(path, body))[0] == 200
    await vllm.until_true()
