"""Tests that a real Triton learns of each client that disconnects from the router, whatever the
model's name is.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_grpc_asked import infer_request
from tests.engines.triton_server import BLOCK_SIZE, CONFIG, SOURCE, TritonServer
from tests.live.stack import Stack, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLS = "tensorrt_llm_bls"
STREAMS = 32
LONG = 8_000  # words, 40 s: longer than a test waits
SOON_S = 10.0


class Alone(TritonServer):
    """A Triton with one model that has the name of a BLS model and calls no other model. Lifetime:
    fixture.
    """

    def repository(self) -> Path:
        """Create the repository of the one model; return its folder."""
        version = self.folder / "models" / BLS / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version.parent / "config.pbtxt").write_text(CONFIG % ("true", BLOCK_SIZE, self.blocks))
        shutil.copy(SOURCE, version / "model.py")
        return version.parents[1]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Stack, Alone]]:
    folder = tmp_path_factory.mktemp("alone")
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    server = Alone(environment, folder, folder / "triton")
    await server.start()
    try:
        await server.until_healthy()
        async with Programs(folder / "logs") as programs, aiohttp.ClientSession() as http:
            arguments = ["serve", "--port", "0", "--admin-port", "0", "--grpc-port", "0"]
            arguments += ["--worker", server.spec]
            stack = Stack(programs, await programs.start("router", "router", arguments), [], http)
            await stack.until_state(0, "ready")
            yield stack, server
    finally:
        await server.stop()


async def running(stack: Stack, server: Alone, count: int) -> None:
    """Wait until `count` requests run in the model, according to the model's own gauge."""
    name = 'nv_trt_llm_request_metrics{model="tensorrt_llm_bls",request_type="active"'
    url = server.metrics_url.removesuffix("/metrics")

    async def reached() -> bool:
        async with stack.http.get(f"{url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = [line for line in lines if line.startswith(name)]
        return bool(found) and float(found[0].rsplit(" ", 1)[1]) == count

    await until(reached, f"{count} to run in the model", SOON_S)


@pytest.mark.parametrize("whose", ["router", "triton"])
async def test_abandoned_http_streams_end_in_the_model(
    alone: tuple[Stack, Alone], whose: str
) -> None:
    stack, server = alone
    url = stack.url if whose == "router" else server.url
    body = {"text_input": "a b c", "max_tokens": LONG, "stream": True}
    replies = []
    for _ in range(STREAMS):
        path = f"{url}/v2/models/{BLS}/generate_stream"
        replies.append(await stack.http.post(path, json=body))
    assert all([await reply.content.readany() for reply in replies])
    await running(stack, server, STREAMS)
    for reply in replies:
        reply.close()
    await running(stack, server, 0)
    await stack.assert_idle()


@pytest.mark.parametrize("whose", ["router", "triton"])
async def test_abandoned_grpc_streams_end_in_the_model(
    alone: tuple[Stack, Alone], whose: str
) -> None:
    stack, server = alone
    address = stack.router.facts["grpc"] if whose == "router" else server.grpc
    async with grpc.aio.insecure_channel(address) as channel:
        calls = []
        for number in range(STREAMS):
            call = Stub(channel).ModelStreamInfer()
            await call.write(infer_request(BLS, f"left-{number}", "a b c", LONG, stream=True))
            calls.append(call)
        await asyncio.gather(*(call.read() for call in calls))
        await running(stack, server, STREAMS)
        for call in calls:
            call.cancel()
        await running(stack, server, 0)
    await stack.assert_idle()
