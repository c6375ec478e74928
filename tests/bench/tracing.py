"""Tracing's cost on the event loop: off, on but not sampled, and on and sampled.

    python -m tests.bench.tracing [--json] [--runs N] [--core C]

Routers as in `request_path`, one for each row, serve batches in turn; figures are CPU time of the
loop's thread, the least of all batches. Rows after the first show how much more they cost than
`off`, in nanoseconds a request; "off as well" shows the noise of such a difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from router.assembly import Router
from router.engines.worker_spec import parse_worker_spec
from router.process.garbage import settle
from router.record.trace_export import Tracing
from router.server.listener import ClientListener
from router.server.server import Connection
from router.settings.ports import client_port_settings
from router.settings.schema import Config
from tests.bench.dataplane.programs import engines
from tests.bench.measuring import Row, arguments, pinned, show
from tests.bench.request_path import BATCH, Client, Loop, requests

NOWHERE = "http://127.0.0.1:9"
UNSAMPLED = b"Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00\r\n\r\n"
PLACES: dict[str, tuple[float | None, bytes]] = {
    "off": (None, b"\r\n\r\n"),
    "off as well": (None, b"\r\n\r\n"),
    "not sampled": (0.0, b"\r\n\r\n"),
    "caller says no": (0.0, UNSAMPLED),
    "sampled": (1.0, b"\r\n\r\n"),
}


def _ends(request: Callable[[], bytes], end: bytes) -> Callable[[], bytes]:
    """Return a function that makes requests as `request` does, with `end` at the end of their
    heads.
    """
    if end == b"\r\n\r\n":
        return request
    return lambda: request().replace(b"\r\n\r\n", b"\r\n" + end, 1)


async def measured(runs: int, urls: list[str]) -> list[Row]:
    """Return one row of costs for each setting of tracing."""
    clients: dict[str, Client] = {}
    ending = []
    async with aiohttp.ClientSession() as http:
        for name, (share, end) in PLACES.items():
            tracing = Tracing()
            if share is not None:
                tracing = Tracing(endpoint=NOWHERE, sample=share)
            config = Config(
                port=0,
                admin_port=0,
                workers=tuple(urls),
                policy="hybrid",
                policy_slow_ms=1e4,
                relay="python",
                tracing=tracing,
            )
            router = Router(config, http)
            settings = client_port_settings(config)
            port = ClientListener(lambda settings=settings: settings, 4_096)  # type: ignore[misc]
            await port.listen(router.client_port())
            await router.start()
            for spec in config.workers:
                router.fleet.add(parse_worker_spec(spec))
            while router.service.ready_workers() < len(urls):  # noqa: ASYNC110 - nothing says
                await asyncio.sleep(0.01)
            connection = Connection(port.server)
            clients[name] = Client(connection, _ends(requests(2_048, ids=False), end))
            ending += [port.aclose, router.aclose]
        settle()
        taken: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(runs + 4):
            for name, client in clients.items():
                start_s = time.thread_time()
                await client.ask(BATCH)
                if turn >= 4:
                    taken[name].append((time.thread_time() - start_s) / BATCH * 1e9)
        for close in ending:
            await close()
    off = min(taken["off"])
    rows = [Row("request path, tracing off", off / 1e3, "us", None)]
    for name in list(PLACES)[1:]:
        more = min(taken[name]) - min(taken["off"])
        rows.append(Row(f"more: {name}", more, "ns", None))
    return rows


def main() -> None:
    """Measure the figures and print them."""
    options = arguments(__doc__ or "", runs=200).parse_args()
    core = pinned(options.core)
    with engines(core) as behind, asyncio.Runner(loop_factory=Loop) as runner:
        rows = runner.run(measured(options.runs, behind.urls))
    show(rows, options.json)


if __name__ == "__main__":
    main()
