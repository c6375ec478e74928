"""Tests that Triton's own clients get the same from a real server and through the router.

One script makes the calls. Results are compared field by field except for ids and times.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from simulator import CHECKOUT
from tests.engines.environment import PERF_ANALYZER, Environment
from tests.engines.pool import Pool
from tests.engines.triton_server import KEPT, WHOLE, TritonServer
from tests.engines.vllm_server import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT = "tests.engines.triton_clients_script"
ENDS_S = 100.0
DIES_S = 5.0  # a server that crashed
LEAST = 200  # results


async def results(url: str, grpc: str, *more: str) -> dict[str, Any]:
    """Run the script of client calls and return its results by name."""
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


async def own_results(server: TritonServer) -> dict[str, Any]:
    """Return the script's results at the server itself; repeat the script if the server crashed.

    Triton 2.51 sometimes ends with signal 11 if a stream is cancelled as it ends
    ("HandleCancellation called even when the context was not cancelled").
    """
    assert server.process is not None
    try:
        return await results(server.url, server.grpc)
    except AssertionError:
        with suppress(TimeoutError):
            await asyncio.wait_for(server.process.wait(), DIES_S)
        if server.process.returncode != -signal.SIGSEGV:
            raise
    await server.kill()  # it leaves shared memory behind
    await server.start()
    await server.until_healthy()
    return await results(server.url, server.grpc)


async def test_each_client_call_gives_the_servers_result(triton: Pool) -> None:
    server = triton.servers[0]
    assert isinstance(server, TritonServer)
    direct = await own_results(server)
    await triton.router.until_state(0, "ready")
    router = triton.router.url, triton.router.router.facts["grpc"]
    routed = await results(*router)
    assert list(routed) == list(direct)
    assert len(direct) > LEAST
    unlike = [name for name in direct if routed[name] != direct[name]]
    assert not unlike, "\n".join(f"{one}: {routed[one]} != {direct[one]}" for one in unlike)
    assert await triton.router.metric("warmroute_inflight_requests") == 0

    # The router can mix on one stream what Triton cannot, because each request has its own stream
    # there.
    each = direct["grpc: stream, many at once"] | direct["grpc: stream, whole at once"]
    assert await results(*router, "mixed") == each


ASKED = 60
STREAM = ("-i", "grpc", "-a", "--streaming")
JSON = ("--input-tensor-format", "json", "--output-tensor-format", "json")
AT_ONCE, AT_A_RATE = ("--concurrency-range", "4"), ("--request-rate-range", "60")
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "HTTP": (WHOLE, ("-i", "http", *AT_ONCE)),
    "HTTP, async, at a rate": (WHOLE, ("-i", "http", "-a", *AT_A_RATE)),
    "HTTP, JSON": (WHOLE, ("-i", "http", *AT_ONCE, *JSON)),
    "gRPC": (WHOLE, ("-i", "grpc", *AT_ONCE)),
    "gRPC, async": (WHOLE, ("-i", "grpc", "-a", *AT_ONCE)),
    "gRPC, streaming": (WHOLE, (*STREAM, *AT_ONCE)),
    "decoupled": (MODEL, (*STREAM, *AT_ONCE)),
    "sequences": (KEPT, (*STREAM, *AT_ONCE, "--shape", "VALUE:1")),
}


@pytest.mark.parametrize("mode", MODES)
async def test_perf_analyzer_measures_through_the_router(
    triton: Pool, mode: str, tmp_path: Path
) -> None:
    """Triton's own load generator, which exits with an error if a request fails, measures through
    the router.
    """
    environment = Environment("perf_analyzer", PERF_ANALYZER).or_skip()
    model, arguments = MODES[mode]
    router = triton.router
    url = router.url.removeprefix("http://") if "http" in arguments else router.router.facts["grpc"]
    prompts = [{"text_input": [f"prompt {n}"], "max_tokens": [4]} for n in range(9)]
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": prompts}))
    process = await asyncio.create_subprocess_exec(
        str(environment.folder / "bin" / "perf_analyzer"),
        *("-m", model, "-u", url, *arguments, "--request-count", str(ASKED)),
        *(() if model == KEPT else ("--input-data", str(data))),
        env={**os.environ, "LD_LIBRARY_PATH": str(environment.folder / "libraries")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(ENDS_S):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = told.decode()
    assert process.returncode == 0, said
    counted = re.search(r"Request count: (\d+)", said)
    assert counted, said
    assert int(counted[1]) >= ASKED
    await router.assert_idle()
