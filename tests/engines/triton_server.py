"""Real `tritonserver`s on a CPU, as programs, with a small text model in the Python backend."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from tests.engines.environment import PYTHON_LIBRARY
from tests.engines.vllm_server import BLOCK_SIZE, MODEL, Server

WHOLE = "tiny_whole"  # the same model, not decoupled: only such a one can be asked by `infer`
SOURCE = Path(__file__).with_name("triton_model.py")
SHARED_MEMORY = Path("/dev/shm")
HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}
CONFIG = """\
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: %s }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters [
  { key: "block_size" value: { string_value: "%d" } },
  { key: "blocks" value: { string_value: "%d" } }
]
"""


@dataclass(slots=True)
class TritonServer(Server):
    """A running `tritonserver`, and a proxy that lists its models. Lifetime: fixture."""

    front_url: str = ""
    _front: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def spec(self) -> str:
        """How the router is told of it: the proxy's URL, for Triton itself lists no models."""
        return self.spec_at(self.front_url)

    def spec_at(self, url: str) -> str:
        """The same, with something else at `url` before it."""
        return f"{url},metrics={self.metrics_url}"

    @property
    def metrics_url(self) -> str:
        """Its metrics have a port of their own."""
        return f"http://127.0.0.1:{self.events[0]}/metrics"

    @property
    def log(self) -> Path:
        """What it says."""
        return self.folder / "tritonserver.log"

    @property
    def _memory(self) -> str:
        """How the names of its shared memory begin."""
        return f"warmroute_triton_{self.port}_"

    def variables(self) -> Mapping[str, str]:
        """Its environment."""
        # The interpreter in Triton's stub takes the packages of the `python3` that it finds first;
        # with another numpy than Triton's it fails at each text.
        paths = os.pathsep.join((str(self.environment.folder / "bin"), os.environ.get("PATH", "")))
        return {**os.environ, "PATH": paths, "LD_LIBRARY_PATH": PYTHON_LIBRARY}

    def repository(self) -> Path:
        """The folder of its models, made."""
        models = self.folder / "models"
        for name, decoupled in ((MODEL, "true"), (WHOLE, "false")):
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (version.parent / "config.pbtxt").write_text(
                CONFIG % (decoupled, BLOCK_SIZE, self.blocks)
            )
            shutil.copy(SOURCE, version / "model.py")
        return models

    def command(self) -> list[str]:
        """What starts it."""
        models = self.repository()
        packages = self.environment.site_packages
        return [
            str(self.environment.folder / "bin" / "tritonserver"),
            *("--model-repository", str(models)),
            *("--backend-directory", str(packages / "pytriton" / "tritonserver" / "backends")),
            *("--backend-config", f"python,shm-region-prefix-name={self._memory}"),
            *("--http-address", "127.0.0.1", "--http-port", str(self.port)),
            *("--metrics-port", str(self.events[0]), "--metrics-interval-ms", "100"),
            *("--allow-grpc", "false", "--allow-gpu-metrics", "false"),
            *self.flags,
        ]

    async def start(self) -> None:
        """As of any server; the proxy begins with the first time, and stays."""
        await Server.start(self)
        if not self.front_url:
            self.front_url = await self._front.enter_async_context(fronted(self.url))

    async def stop(self) -> None:
        """As of any server, and the proxy ends."""
        await self._front.aclose()
        await Server.stop(self)

    async def _healthy(self) -> bool:
        try:
            async with aiohttp.request("GET", f"{self.url}/v2/health/ready") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        """kill -9 of the server and of its models' processes, which leave their memory behind."""
        await Server.kill(self)
        for left in self._memory_left():
            left.unlink()

    def _memory_left(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self._memory}*"))


@asynccontextmanager
async def fronted(server: str) -> AsyncIterator[str]:
    """The URL of a proxy that adds a list of models, in OpenAI's form, to what the server has."""

    async def models(request: web.Request) -> web.Response:
        async with http.post(f"{server}/v2/repository/index") as reply:
            ids = [one["name"] for one in json.loads(await reply.read())]
        return web.json_response({"object": "list", "data": [{"id": one} for one in ids]})

    async def passed_on(request: web.Request) -> web.StreamResponse:
        kept = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        url, body = f"{server}{request.rel_url}", await request.read()
        async with http.request(request.method, url, data=body, headers=kept) as reply:
            headers = {k: v for k, v in reply.headers.items() if k.lower() not in HOP}
            answer = web.StreamResponse(status=reply.status, headers=headers)
            answer.content_length = reply.content_length
            await answer.prepare(request)
            async for piece in reply.content.iter_any():
                await answer.write(piece)
            return answer

    @web.middleware
    async def closing(request: web.Request, handler: Handler) -> web.StreamResponse:
        """A server that is gone has the client's connection closed, as without the proxy."""
        try:
            return await handler(request)
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.close()
            return web.Response(status=502)

    async with aiohttp.ClientSession(auto_decompress=False) as http:
        app = web.Application(middlewares=[closing])
        app.router.add_get("/v1/models", models)
        app.router.add_route("*", "/{path:.*}", passed_on)
        # A client that leaves takes its request with it, here and so at the server.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
