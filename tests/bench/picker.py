"""The latency that the picker adds to a request through Envoy, compared with an echoing picker.

    python -m tests.bench.picker [--runs 5] [--seconds 4] [--json]

A real Envoy (that of `make test-engines`) runs with the bootstrap
docs/deploy/envoy/original-dst.yaml, and with the same one in full duplex body mode, as gateways
have it, in front of one worker that answers at once. The router as the picker alternates with a
gRPC server that parses each message, names the worker and changes nothing. Load is 50 requests/s of
2 KB and of 100 KB; CPU is the picker's, for each request. Then 50 streams of events go through
Envoy with the picker and through Envoy alone: the figure is the time of an event from the worker to
the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import uvloop
from aiohttp import web

from router.picker import messages
from router.picker.messages import PLAIN
from simulator.live.processes import Programs
from tests.bench.dataplane.cpu import cpu_s
from tests.bench.measuring import Row, show
from tests.engines.envoy import Envoy, duplex, filters_of, running_envoy
from tests.live.ports import lasting_port
from tests.live.stack import until
from tests.served_app import served_by

RATE, P50, P99, CPU = 50, 1.5, 2.0, 2.0
SIZES = {"2 KB": 2_000, "100 KB": 100_000}
STREAMS, EVENTS, GAP_S = 50, 40, 0.02
PATH, MODEL = "/v1/completions", "bench"


async def worker(request: web.Request) -> web.StreamResponse:
    """Answer a request at once, or with events that carry the time at which they were sent."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})
    if request.method == "GET":
        return web.json_response({}) if request.path == "/health" else web.Response(status=404)
    body = await request.read()
    if b'"stream": true' not in body[:200]:
        return web.json_response({"choices": [{"index": 0, "text": "yes"}]})
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    for _ in range(EVENTS):
        await asyncio.sleep(GAP_S)
        await reply.write(b"data: %.9f\n\n" % time.perf_counter())
    return reply


def echo_answers(message: Any, endpoint: bytes, buffered: bool) -> list[bytes]:
    """Return the messages of a picker that always names the same worker."""
    arm, named = messages.arm_of(message), endpoint.decode()
    change = messages.mutation([(messages.DESTINATION.encode(), endpoint)])
    if arm == "request_headers":
        now = not buffered or message.request_headers.end_of_stream
        return [messages.headers_answer(arm, change, named) if now else PLAIN[arm]]
    if arm == "request_body" and buffered:
        return [messages.whole_body(change, named, None)]
    if arm in ("request_body", "response_body"):
        came = getattr(message, arm)
        return [messages.piece(arm, came.body, came.end_of_stream)]
    return [] if arm is None else [PLAIN[arm]]


async def echo(port: int, endpoint: str, buffered: bool) -> None:
    """Run the picker that always names the same worker, forever."""

    async def process(_: object, context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            for answer in echo_answers(messages.read(data), endpoint.encode(), buffered):
                await context.write(answer)

    async def check(_: bytes, __: Any) -> bytes:
        return b"\x08\x01"

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            if details.method == messages.PROCESS:
                return grpc.stream_stream_rpc_method_handler(process)
            return grpc.unary_unary_rpc_method_handler(check)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


@dataclass(slots=True)
class Way:
    """One compared setup between client and worker (the router as picker, the echoing picker, or
    Envoy alone) with its measurements. Lifetime: bench.
    """

    name: str
    envoy: Envoy
    pid: int | None = None  # of the picker
    taken_s: list[list[float]] = field(default_factory=list)  # of each slice
    cpu_s: float = 0.0

    @property
    def requests(self) -> int:
        return sum(map(len, self.taken_s))

    def cpu_us(self) -> float:
        """Return the picker's CPU microseconds for a request."""
        return 1e6 * self.cpu_s / self.requests

    def at(self, share: float) -> float:
        """Return a quantile of the latency in milliseconds, as the median of the slices'
        quantiles.
        """
        each = [sorted(one)[int(share * (len(one) - 1))] for one in self.taken_s]
        return 1e3 * statistics.median(each)


async def slice_of(way: Way, http: aiohttp.ClientSession, body: bytes, seconds: float) -> None:
    """Send requests at fixed times, whether or not earlier ones were answered."""
    taken_s = list[float]()
    before_s = 0.0 if way.pid is None else cpu_s(way.pid)
    begin_s = time.perf_counter()

    async def one(at_s: float) -> None:
        await asyncio.sleep(begin_s + at_s - time.perf_counter())
        sent_s = time.perf_counter()
        async with http.post(f"{way.envoy.url}{PATH}", data=body) as reply:
            await reply.read()
            assert reply.status == 200, await reply.text()
        taken_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(one(number / RATE) for number in range(int(seconds * RATE))))
    way.taken_s.append(taken_s)
    if way.pid is not None:
        way.cpu_s += cpu_s(way.pid) - before_s


async def stream_delays(way: Way, http: aiohttp.ClientSession) -> list[float]:
    """Return for each event of many streams the seconds that it takes from the worker to the
    client.
    """
    body = json.dumps({"stream": True, "model": MODEL, "prompt": "a"}).encode()

    async def one() -> list[float]:
        async with http.post(f"{way.envoy.url}{PATH}", data=body) as reply:
            found = list[float]()
            async for line in reply.content:
                if line.startswith(b"data: "):
                    found.append(time.perf_counter() - float(line[6:]))
            return found

    every = await asyncio.gather(*(one() for _ in range(STREAMS)))
    return [delay for each in every for delay in each]


def alone(endpoint: str, config: Any) -> None:
    """Remove the picker from the bootstrap: Envoy itself sets the endpoint's header."""
    filters = filters_of(config)
    del filters[1]
    header = {"key": "x-gateway-destination-endpoint", "value": endpoint}
    filters[0]["typed_config"]["mutations"]["request_mutations"] = [
        {"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
    ]


async def ended(process: asyncio.subprocess.Process) -> None:
    """Stop a program and wait for its end."""
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def ways(folder: Path, buffered: bool) -> AsyncIterator[list[Way]]:
    """Yield the three compared setups: Envoy with the router as picker, Envoy with the echoing
    picker, and Envoy alone.
    """
    async with AsyncExitStack() as all_of:
        url = await all_of.enter_async_context(served_by(worker, client_max_size=1 << 24))
        endpoint = url.removeprefix("http://")
        programs = await all_of.enter_async_context(Programs(folder / "logs"))
        flags = ["serve", "--port", "0", "--admin-port", "0", "--picker-port", "0"]
        flags += ["--worker", f"{url},kind=openai,model={MODEL}"]
        router = await programs.start("router", "router", flags)
        port = lasting_port()
        command = [sys.executable, "-m", "tests.bench.picker", "--echo", str(port), endpoint]
        echoing = await asyncio.create_subprocess_exec(*command, str(int(buffered)))
        all_of.push_async_callback(ended, echoing)
        change = (lambda config: None) if buffered else duplex
        start = partial(running_envoy, folder, "original-dst.yaml")
        found = [
            Way(name, await all_of.enter_async_context(start([at], change=how)), pid)
            for name, at, how, pid in (
                ("warmroute", router.facts["picker"], change, router.process.pid),
                ("echo", f"127.0.0.1:{port}", change, echoing.pid),
                ("no picker", f"127.0.0.1:{port}", partial(alone, endpoint), None),
            )
        ]
        yield found


async def measure(runs: int, seconds: float, buffered: bool) -> list[Row]:
    """Return the rows of all figures for one body mode."""
    mode, rows = "buffered" if buffered else "duplex", list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        async with ways(Path(folder), buffered) as found, aiohttp.ClientSession() as http:
            for way in found:
                await until(partial(_answers, way, http), f"{way.name} to answer")
            for size, count in SIZES.items():
                for way in found:
                    way.taken_s, way.cpu_s = [], 0.0
                body = json.dumps({"model": MODEL, "prompt": "word " * (count // 5)}).encode()
                for _ in range(runs):
                    for way in found:
                        await slice_of(way, http, body, seconds)
                ours, theirs, _ = found
                what = f"{mode}, {size}"
                for name, share, bar in (("p50", 0.5, P50), ("p99", 0.99, P99)):
                    rows += [
                        Row(f"{what}: {name} {way.name}", way.at(share), "ms") for way in found
                    ]
                    ratio = ours.at(share) / theirs.at(share)
                    rows.append(Row(f"{what}: {name}, warmroute / echo", ratio, "times", bar))
                ratio = ours.cpu_us() / theirs.cpu_us()
                rows += [
                    Row(f"{what}: CPU a request {way.name}", way.cpu_us(), "us")
                    for way in (ours, theirs)
                ]
                rows.append(Row(f"{what}: CPU, warmroute / echo", ratio, "times", CPU))
            if buffered:
                rows += await streams(found, http, runs)
    return rows


async def streams(found: list[Way], http: aiohttp.ClientSession, runs: int) -> list[Row]:
    """Return the rows that compare how long events take with the picker and without."""
    ours, _, without = found
    each: dict[str, list[float]] = {ours.name: [], without.name: []}
    for _ in range(runs):
        for way in (ours, without):
            each[way.name].append(statistics.median(await stream_delays(way, http)))
    return [
        Row(f"event, 50 streams: p50 {name}", 1e3 * statistics.median(delays), "ms")
        for name, delays in each.items()
    ]


async def _answers(way: Way, http: aiohttp.ClientSession) -> bool:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    async with http.post(f"{way.envoy.url}{PATH}", data=body) as reply:
        return reply.status == 200


def main() -> None:
    """Measure the figures and print them."""
    if sys.argv[1:2] == ["--echo"]:
        port, endpoint, buffered = sys.argv[2:5]
        uvloop.run(echo(int(port), endpoint, buffered == "1"))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="turns")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn and way")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    rows = list[Row]()
    for buffered in (True, False):
        rows += asyncio.run(measure(options.runs, options.seconds, buffered))
    show(rows, options.json)


if __name__ == "__main__":
    main()
