"""The cost of a request in the router's own code, without the kernel and the network.

    python -m tests.bench.request_path [--json] [--runs N] [--core C] [--profile FILE]

The whole router, as `serve` builds it, runs on an event loop whose sockets to clients and to one
worker are replaced by objects: a client's bytes are passed directly to the connection, a worker's
answer to the relay. One client sends one request after the other. Figures are the CPU time of
batches, the least of them, which other load moves least. `--profile` writes cProfile's statistics
of the last row.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import uvloop

from router.assembly import Router
from router.engines.worker_spec import parse_worker_spec
from router.process.garbage import settle
from router.server.listener import ClientListener
from router.server.server import Connection
from router.settings.ports import client_port_settings
from router.settings.schema import Config
from tests.bench.dataplane.programs import engines
from tests.bench.measuring import Row, arguments, pinned, show

BATCH = 50
TEXT = "The quick brown fox jumps over the lazy dog, and\n says so. "
ANSWER_BODY = b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"%s"}],' % (
    b"y" * 200
) + (b'"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}}')
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(ANSWER_BODY),
    ANSWER_BODY,
)


class Wire(asyncio.Transport):
    """A transport object in place of a socket; it calls `on_write` with the written data. Lifetime:
    connection.
    """

    def __init__(self, protocol: asyncio.Protocol, on_write: Callable[[bytes], None]) -> None:
        self._ends = socket.socketpair()  # carries nothing; the server asks it for unread bytes
        super().__init__({"peername": ("127.0.0.1", 1), "socket": self._ends[0]})
        self._protocol = protocol
        self._on_write = on_write
        self._closing = False
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._on_write(data)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits, since there is no buffer."""

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            for end in self._ends:
                end.close()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()


class Loop(uvloop.Loop):
    """An event loop that answers outgoing connections at once, without a socket."""

    async def create_connection(  # type: ignore[override]
        self, factory: Any, *where: Any, **more: Any
    ) -> Any:
        if "sock" in more:  # the connections of aiohttp, which probes use
            return await super().create_connection(factory, *where, **more)
        protocol = factory()
        waiting = bytearray()

        def on_write(data: bytes) -> None:
            waiting.extend(data)
            end = waiting.find(b"\r\n\r\n")
            at = waiting.find(b"Content-Length: ", 0, end)
            length = int(waiting[at + 16 : waiting.find(b"\r", at)])
            if len(waiting) >= end + 4 + length:
                waiting.clear()
                self.call_soon(protocol.data_received, ANSWER)

        return Wire(protocol, on_write), protocol


class Client:
    """Sends one request after the other on one connection. Lifetime: a measurement."""

    def __init__(self, connection: Connection, request: Callable[[], bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._request = request
        self._left = 0
        self._done: asyncio.Future[None] = self._loop.create_future()
        Wire(connection, self._answered)

    async def ask(self, times: int) -> None:
        """Send requests one after the other until `times` were answered."""
        self._left, self._done = times, self._loop.create_future()
        self._send()
        await self._done

    def _send(self) -> None:
        self._connection.data_received(self._request())

    def _answered(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 200 "), data[:300]
        self._left -= 1
        if self._left:
            self._loop.call_soon(self._send)
        else:
            self._loop.call_soon(self._done.set_result, None)


def requests(text_bytes: int, ids: bool) -> Callable[[], bytes]:
    """Return a function that returns requests in turn; a quarter of each prompt is shared."""
    made = []
    for number in range(64):
        text = TEXT * (text_bytes // len(TEXT) + 1)
        text = text[: text_bytes // 4] + f"{number:8}" + text[text_bytes // 4 : text_bytes - 8]
        prompt: object = [ord(c) * 391 for c in text[: text_bytes // 6]] if ids else text
        body = json.dumps({"model": "bench", "prompt": prompt, "max_tokens": 16}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: router:8000\r\nUser-Agent: bench/1\r\n"
            b"Accept: */*\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
        )
        made.append(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    turn = 0

    def request() -> bytes:
        nonlocal turn
        turn += 1
        return made[turn % len(made)]

    return request


ROWS = (
    ("2 KB text", 2_048, False, 75.0),
    ("64 KB text", 65_536, False, 150.0),
    ("2 KB of token ids", 2_048, True, None),
)


async def measured(runs: int, urls: list[str], profile: str | None) -> list[Row]:
    """Return one row for each kind of request."""
    config = Config(
        port=0,
        admin_port=0,
        workers=tuple(urls),
        policy="hybrid",
        policy_slow_ms=1e4,
        relay="python",
    )
    rows = []
    async with aiohttp.ClientSession() as http:
        router = Router(config, http)
        port = ClientListener(lambda: client_port_settings(router.config), 4_096)
        await port.listen(router.client_port())
        await router.start()
        for spec in config.workers:
            router.fleet.add(parse_worker_spec(spec))
        while router.service.ready_workers() < len(urls):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        settle()
        for name, size, ids, bar in ROWS:
            connection = Connection(port.server)
            client = Client(connection, requests(size, ids))
            await client.ask(4 * BATCH)
            taken = []
            for _ in range(runs):
                start_s = time.thread_time()
                await client.ask(BATCH)
                taken.append((time.thread_time() - start_s) / BATCH * 1e6)
            rows.append(Row(f"request path, {name}", min(taken), "us", bar))
            if profile is not None:
                with cProfile.Profile() as found:
                    await client.ask(20 * BATCH)
                found.dump_stats(f"{profile}.{size}")
        await port.aclose()
        await router.aclose()
    return rows


def main() -> None:
    """Measure the figures and print them."""
    parser = arguments(__doc__ or "", runs=100)
    parser.add_argument("--profile", metavar="FILE", help="cProfile statistics, one file a row")
    options = parser.parse_args()
    core = pinned(options.core)
    with engines(core) as behind, asyncio.Runner(loop_factory=Loop) as runner:
        rows = runner.run(measured(options.runs, behind.urls, options.profile))
    show(rows, options.json)


if __name__ == "__main__":
    main()
