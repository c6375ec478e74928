"""The time until both workers of a disaggregated request learn that its client left.

    python -m tests.bench.leaving [--clients 300] [--json]

A router serves a prefill worker and a decode worker that never answer. Each client leaves once its
request has arrived at the worker in question; the figure is the time from then until the worker
sees its connection end. In a second part our engine prefills, and the figure is the time until it
has freed the blocks kept for the decode worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.measuring import Row, show
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, running

BAR_MS, FREE_BAR_MS = 50.0, 100.0
LEGS = ("prefill", "decode")
_MODELS = b'{"object":"list","data":[{"id":"%b"}]}' % MODEL.encode()
_KV = (
    b'{"remote_engine_id":"e","remote_block_ids":[[1]],"remote_request_id":"r",'
    b'"remote_host":"h","remote_port":1}'
)
_KEPT = b'{"choices":[{"text":"a","finish_reason":"length"}],"kv_transfer_params":%b}' % _KV


@dataclass(slots=True)
class Silent:
    """A worker that never answers inference requests, or answers them with the reply `_KEPT` if
    `answers` is true. Lifetime: bench.
    """

    answers: bool
    came: asyncio.Event = field(default_factory=asyncio.Event)
    ended_s: asyncio.Future[float] = field(default_factory=lambda: _loop().create_future())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                lengths = [int(one.split(b":")[1]) for one in lines if b"content-length" in one]
                await reader.readexactly(sum(lengths))
                if head.startswith(b"GET"):
                    writer.write(_ok(_MODELS if b" /v1/models " in head else b"{}"))
                elif self.answers:
                    writer.write(_ok(_KEPT))
                else:
                    self.came.set()
                    assert not await reader.read(1), "a request that was not awaited"
                    self.ended_s.set_result(time.monotonic())
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def leave(stack: Stack, worker: Silent) -> float:
    """Return the milliseconds from a client's disconnection to the end of its worker's
    connection.
    """
    worker.came, worker.ended_s = asyncio.Event(), _loop().create_future()
    port = int(stack.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": MODEL, "prompt": "a b c", "max_tokens": 16, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    await worker.came.wait()
    left_s = time.monotonic()
    writer.close()
    return 1e3 * (await worker.ended_s - left_s)


async def measure(leg: str, clients: int) -> list[float]:
    """Return the milliseconds for each client that leaves while its request is at the prefill or
    the decode worker, as `leg` says.
    """
    silent = [Silent(answers=leg == "decode" and role == "prefill") for role in LEGS]
    flags = ["--disaggregation", "always"]
    async with AsyncExitStack() as all_of:
        folder = Path(all_of.enter_context(tempfile.TemporaryDirectory()))
        stack = await all_of.enter_async_context(running(folder, 0, flags))
        for worker, role in zip(silent, LEGS, strict=True):
            server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
            await all_of.enter_async_context(server)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await stack.add(f"{url},kind=vllm,events=none,role={role},group=g")
        found = [await leave(stack, silent[LEGS.index(leg)]) for _ in range(clients)]
        await stack.assert_idle()
    return found


async def freed(clients: int) -> list[float]:
    """Return the milliseconds from each client's disconnection until the prefill engine has freed
    its blocks.
    """
    decode, found = Silent(answers=False), list[float]()
    async with AsyncExitStack() as all_of:
        folder = Path(all_of.enter_context(tempfile.TemporaryDirectory()))
        stack = await all_of.enter_async_context(running(folder, 0, ["--disaggregation", "always"]))
        engine = await stack.programs.start("prefill", "engine", engine_arguments(speed=100))
        server = await asyncio.start_server(decode.serve, "127.0.0.1", 0)
        await all_of.enter_async_context(server)
        await stack.add(f"{engine.url},role=prefill,group=g")
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await stack.add(f"{url},kind=vllm,events=none,role=decode,group=g")
        for _ in range(clients):
            left_s = time.monotonic() - await leave(stack, decode) / 1e3
            while await metric_sum(stack.http, engine.url, "warmroute_engine_kv_exports"):
                pass
            found.append(1e3 * (time.monotonic() - left_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=300, help="that leave, at each leg")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    rows = list[Row]()
    for leg in LEGS:
        found = sorted(asyncio.run(measure(leg, options.clients)))
        rows.append(Row(f"{leg}: its worker knows, p50", statistics.median(found), "ms"))
        rows.append(Row(f"{leg}: p99", found[int(0.99 * len(found))], "ms", BAR_MS))
    found = sorted(asyncio.run(freed(options.clients)))
    rows.append(Row("prefill: its KV is free, p50", statistics.median(found), "ms"))
    rows.append(
        Row("prefill: its KV is free, p99", found[int(0.99 * len(found))], "ms", FREE_BAR_MS)
    )
    show(rows, options.json)


if __name__ == "__main__":
    main()
