"""CPU time of the relay for each request and event, compared with a plain aiohttp proxy.

    python -m tests.bench.relay [--seconds 3] [--rounds 3]

Both are measured in the same run. One proxy at a time runs on the last core; worker and load share
the first. The CPU time is the proxy's own, from the kernel, so other load moves it less than wall
time; ratios within a round move least. Rounds are interleaved and medians shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import aiohttp
import uvloop
from aiohttp import web

from router.body.scan import scan
from router.http.messages import Answer, Request
from router.http.reply import Timeouts
from router.upstream.client_reply import ClientReply, upstream_request
from router.upstream.fallback import Upstream
from router.upstream.native import NativeRelay, NativeUpstream
from tests.router.server_support import serving

EVENT = b"data: " + b"x" * 192 + b"\n\n"
EVENT_CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n" + (
    b"y" * 200
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS_A_STREAM = 40
GAP_S = 0.025
PROXIES = ("plain aiohttp", "relay in Python", "relay thread", "thread and scan")


class HttpPeer(asyncio.Protocol):
    """The server side of an HTTP connection, which reads requests with a content length and answers
    each. Lifetime: connection.
    """

    def __init__(self, answer: Callable[[HttpPeer, bytes], None]) -> None:
        self.transport: asyncio.Transport
        self._answer = answer
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self._buffer.lower().find(b"content-length:", 0, end)
        length = int(self._buffer[at + 15 : self._buffer.find(b"\r", at)])
        if len(self._buffer) >= end + 4 + length:
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 + length :]
            self._answer(self, head)


def answer_as_worker(peer: HttpPeer, head: bytes) -> None:
    """Write a fixed reply, or a stream of events with `GAP_S` between them."""
    if b"/stream" not in head[:40]:
        peer.transport.write(REPLY)
        return
    peer.transport.write(STREAM)
    loop = asyncio.get_running_loop()

    def event(left: int) -> None:
        if left:
            peer.transport.write(EVENT_CHUNK)
            loop.call_later(GAP_S, event, left - 1)
        else:
            peer.transport.write(b"0\r\n\r\n")

    loop.call_later(GAP_S, event, EVENTS_A_STREAM)


async def serve_relay(worker_port: int, native: bool, with_scan: bool) -> None:
    """Run the router's relay without decisions; with `with_scan`, it reads the events of
    streams.
    """
    upstream = Upstream("127.0.0.1", worker_port, time.monotonic)
    if native:
        upstream = NativeUpstream(NativeRelay(), "127.0.0.1", worker_port, time.monotonic)
    timeouts = Timeouts()
    told: deque[float] = deque(maxlen=1)

    async def handle(request: Request) -> Answer:
        body = request.body
        if with_scan:
            scan(body, "/v1/completions")
        reply = ClientReply(request)
        sent = upstream_request(request, body)
        if request.path == "/stream":
            outcome = await upstream.send(
                sent, reply, timeouts, told.append, lambda now_s, events: told.append(now_s)
            )
        else:
            outcome = await upstream.send(sent, reply, timeouts)
        assert outcome.error is None, outcome.error
        return reply

    async with serving(handle, paths=()) as it:
        print(it.port, flush=True)
        await asyncio.Event().wait()


async def serve_plain(worker_port: int) -> None:
    """Run the simplest proxy: aiohttp on both sides."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            url = f"http://127.0.0.1:{worker_port}{request.path_qs}"
            headers = {k: v for k, v in request.headers.items() if k not in ("Host", "Connection")}
            async with session.post(url, data=body, headers=headers) as reply:
                client = web.StreamResponse(status=reply.status)
                client.content_type = reply.content_type
                await client.prepare(request)
                async for data in reply.content.iter_any():
                    await client.write(data)
                await client.write_eof()
                return client

        await serve(handle)


async def serve(handle: Callable[[web.Request], object]) -> None:
    """Serve with `handle` until the process is killed; print the port to standard output."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", handle)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextmanager
def proxy(name: str, worker_port: int, core: int) -> Iterator[tuple[int, int]]:
    """Run a proxy process on `core`; yield its process id and port."""
    command = [sys.executable, "-m", "tests.bench.relay", "--serve", name, str(worker_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of the process's threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def load(port: int, request: bytes, end: bytes, clients: int, stop_s: float) -> int:
    """Run `clients` connections that each send one request after the other; return how many replies
    ended before `stop_s`.
    """
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        # Streams start at different times; if they started together, they would share their
        # wake-ups.
        await asyncio.sleep(number / clients * GAP_S)
        with suppress(asyncio.IncompleteReadError):
            while time.monotonic() < stop_s:
                writer.write(request)
                await reader.readuntil(end)
                done += 1
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return done


def request_of(path: str, size: int) -> bytes:
    body = b'{"model": "m", "prompt": "%s"}' % (b"a" * (size - 28))
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


CASES = {
    "2 KB request": (request_of("/v1/completions", 2048), b"y" * 200, 32, 1),
    "64 KB request": (request_of("/v1/completions", 65_536), b"y" * 200, 32, 1),
    "event of 200 bytes": (request_of("/stream", 2048), b"0\r\n\r\n", 96, EVENTS_A_STREAM),
}


async def measure(seconds: float, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return CPU microseconds by (case, proxy), with one figure for each round."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpPeer(answer_as_worker), "127.0.0.1", 0)
    worker_port = server.sockets[0].getsockname()[1]
    figures: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for case, (request, end, clients, units) in CASES.items():
            for name in PROXIES:
                with proxy(name, worker_port, cores[-1]) as (pid, port):
                    await load(port, request, end, clients, time.monotonic() + 0.5)
                    before_s = cpu_s(pid)
                    replies = await load(port, request, end, clients, time.monotonic() + seconds)
                    us = (cpu_s(pid) - before_s) * 1e6 / (replies * units)
                figures.setdefault((case, name), []).append(us)
                print(f"{case:20} {name:16} {us:8.1f} us", file=sys.stderr, flush=True)
    server.close()
    return figures


def table(figures: dict[tuple[str, str], list[float]]) -> str:
    """Return a Markdown table with medians and their ratio to the plain proxy."""
    lines = [
        "| CPU us per | " + " | ".join(PROXIES) + " | Python / thread |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        medians = [statistics.median(figures[case, name]) for name in PROXIES]
        cells = " | ".join(f"{us:.1f}" for us in medians)
        lines.append(f"| {case} | {cells} | {medians[1] / medians[2]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, metavar=("PROXY", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, port = options.serve
        if name == PROXIES[0]:
            uvloop.run(serve_plain(int(port)))
        else:
            native, scans = name != PROXIES[1], name == PROXIES[3]
            uvloop.run(serve_relay(int(port), native, scans))
    else:
        print(table(uvloop.run(measure(options.seconds, options.rounds))))


if __name__ == "__main__":
    main()
