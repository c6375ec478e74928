"""Tests that the engine dashboard has data for each kind of engine in a real Prometheus.

The pages in `pages/` were recorded from real servers: vLLM 0.32.0, SGLang 0.5.23, and Triton 2.51,
whose model exports the metrics of the TensorRT-LLM backend. TensorRT-LLM's own page has the names
in its source.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.grafana.monitoring import Prometheus, prometheus
from tests.grafana.shown import FILES, PAGES, resolved, targets
from tests.live.stack import until

ROUTER = "# TYPE warmroute_request_seconds histogram\nwarmroute_request_seconds_count 10\n"
ROWS = [panel for panel in FILES["engine"]["panels"] if panel["type"] == "row"]
OPEN = [panel for panel in FILES["engine"]["panels"] if panel["type"] != "row"]
FOLDED = {row["title"]: row["panels"] for row in ROWS if row["panels"]}
OF_ALL = {panel["title"] for panel in OPEN} | {
    panel["title"]
    for title, panels in FOLDED.items()
    for panel in panels
    if not title.startswith("warmroute-engine")
}
# Panels of all engines that stay empty before one that has no such metric.
WITHOUT = {
    "vllm": set[str](),
    "sglang": set[str](),
    "trtllm": {"Preempted"},
    "triton": {
        *("Hit ratio", "Tokens given", "First token, p99", "Between tokens, p99", "Preempted"),
        *("Tokens", "Prefix hits, the worst engines", "Prompt tokens and those found"),
        *("Time to first token", "Between tokens", "Whole request"),
        *("Time to first token by engine, p99", "KV in use", "KV usage"),
    },
}


def grown(page: str, times: int) -> str:
    """Return the metrics page with all counters multiplied, as after more of the same traffic."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    lines = []
    for line in page.splitlines():
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        family = next((f for f in (name, re.sub(r"_(bucket|sum|count|total)$", "", name))
                       if f in kinds), "")  # fmt: skip
        if line.startswith("#") or kinds.get(family) not in ("counter", "histogram"):
            lines.append(line)
        else:
            labels, _, value = line.rpartition(" ")
            lines.append(f"{labels} {float(value) * times}")
    return "\n".join([*lines, ""])


def serving(page: str) -> TestServer:
    """Return a server of a metrics page whose counters grow with each request for it."""
    scrapes = itertools.count(1)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=grown(page, next(scrapes)))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return TestServer(app)


async def with_data(server: Prometheus, engine: str) -> set[str]:
    """Return the titles of the panels that show a number for this engine."""
    found = set()
    for panel in [*OPEN, *itertools.chain(*FOLDED.values())]:
        for expr in targets(panel):
            rows = await server.query(resolved(expr, server.target, engine))
            if any(not math.isnan(float(row["value"][1])) for row in rows):
                found.add(panel["title"])
    return found


async def test_panels_for_engines_have_data_with_each_kind_of_engine(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = await stack.enter_async_context(serving(ROUTER))
        engines = {}
        for kind in WITHOUT:
            page = (PAGES / f"{kind}.txt").read_text(encoding="utf-8")
            server = await stack.enter_async_context(serving(page))
            engines[kind] = f"127.0.0.1:{server.port}"
        scraped = {
            "warmroute": [f"http://127.0.0.1:{router.port}"],
            "engine": [f"http://{address}" for address in engines.values()],
        }
        server = await stack.enter_async_context(prometheus(http, tmp_path, scraped))
        for kind, address in engines.items():

            async def complete(kind: str = kind, address: str = address) -> bool:
                return OF_ALL - WITHOUT[kind] <= await with_data(server, address)

            await until(complete, f"all panels to have data before {kind}")
            assert OF_ALL - await with_data(server, address) == WITHOUT[kind], kind
        together = await with_data(server, "|".join(engines.values()))
        assert together >= OF_ALL
        (count,) = await server.query(
            resolved(targets(next(p for p in OPEN if p["title"] == "Engines"))[0], "", ".*")
        )
        assert int(count["value"][1]) == len(engines), "each kind of engine counts"
