"""Tests that dashboards query only existing metrics and show all of them, and that a real
Prometheus answers the queries.
"""

from __future__ import annotations

import importlib.util
import re
import shutil

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.grafana.monitoring import (
    exposition,
    prometheus,
    promtool,
    run,
    samples,
    tokenizing,
    traffic_of_every_kind,
)
from tests.grafana.shown import (
    FILES,
    NO_DATA,
    NOT_SHOWN,
    NOT_SHOWN_OF_ENGINES,
    PANELS,
    resolved,
    targets,
)
from tests.live.redis_server import RedisServer
from tests.live.stack import computing_arguments, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

METRIC = r"\b(?:(?:instance|job):)?(?:warmroute_|vllm:)[\w:]+"
REDIS = shutil.which("redis-server") is not None
TORCH = importlib.util.find_spec("torch") is not None
QUERIES = {
    (dashboard, title, expr)
    for (dashboard, title), panel in PANELS.items()
    for expr in targets(panel)
}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Yield flags for routers that share state, or none if Redis is not installed."""
    if not REDIS:
        yield []
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield ["--state", server.url]
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory, state):
    nobody = tmp_path_factory.mktemp("source") / "workers.txt"
    nobody.write_text("# none\n")
    model = tokenizing(tmp_path_factory.mktemp("model"))
    router = [*model, *state, "--discover", f"file:{nobody}", "--replicas-name", "one"]
    logs = tmp_path_factory.mktemp("logs")
    async with running(logs, workers=2, router=router) as stack:
        if state:
            await second_router(stack, [*model, *state])
        async with traffic_of_every_kind(stack):
            yield stack


async def second_router(stack, flags: list[str]) -> None:
    """Start another router of the same workers and wait until both know each other."""
    flags = [*flags, "--replicas-name", "two", "--port", "0", "--admin-port", "0"]
    for worker in stack.workers:
        flags += ["--worker", worker.url]
    await stack.programs.start("peer", "router", ["serve", *flags])

    async def known() -> bool:
        return await stack.metric("warmroute_replicas_peer_in_sync") == 1

    await until(known, "the routers to know of each other")


def metrics_on_dashboards(names=FILES) -> set[str]:
    """Return the names of all metrics in all panels of these dashboards."""
    return {
        name
        for dashboard, _, expr in QUERIES
        if dashboard in names
        for name in re.findall(r"(?<![\w:])(?:warmroute_\w+|vllm:\w+)", expr)
    }


async def test_every_metric_is_on_a_dashboard_or_listed_with_a_reason(stack) -> None:
    there = {name for name in samples(await exposition(stack)) if name.startswith("warmroute_")}
    assert there - metrics_on_dashboards() == set(NOT_SHOWN)
    if not REDIS:
        pytest.skip("redis-server is not installed: what replicas count was not looked at")
    ours = {name for name in metrics_on_dashboards() if name.startswith("warmroute_")}
    engine = await of_engine(stack)
    unknown = ours - there - engine - set(NO_DATA)
    assert not unknown, f"not in /metrics: {sorted(unknown)}"
    assert not (there | engine) & set(NO_DATA)
    assert engine - metrics_on_dashboards() == set(NOT_SHOWN_OF_ENGINES)


async def of_engine(stack) -> set[str]:
    async with stack.http.get(f"{stack.workers[0].url}/metrics") as reply:
        return set(samples(await reply.text()))


async def test_every_value_of_a_coloured_label_is_known(stack) -> None:
    """Every label value with a colour of its own is known, so that a new state, code or kind does
    not appear in the colour of another one.
    """
    text = await exposition(stack)
    values = set(re.findall(r"\b(?:state|code|kind)=\"(\w+)\"", text))
    rules = (rule for panel in PANELS.values() for rule in panel["fieldConfig"]["overrides"])
    assert values <= {rule["matcher"]["options"].strip("/$") for rule in rules}


async def test_promtool_accepts_the_metrics(stack) -> None:
    text = await exposition(stack)
    # It reports creation times as separate gauges; the client library adds these.
    lines = [line for line in text.splitlines(keepends=True) if "_created" not in line]
    checked = run([promtool(), "check", "metrics"], "".join(lines))
    assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_a_real_prometheus_answers_every_panel_and_rule(stack, tmp_path) -> None:
    """A real Prometheus has data for every panel and rule; the pool has simulated engines and, if
    torch is installed, one that computes.
    """
    engines = []
    if TORCH:
        from engine.model.tiny import TinySettings, make_tiny

        make_tiny(tmp_path / "tiny", TinySettings())
        arguments = computing_arguments(tmp_path / "tiny")
        real = await stack.programs.start("real", "engine", arguments)
        engines.append(real.url)
        await send_completion(stack.http, real.url)
    targets = {"warmroute": [stack.admin], "engine": [*(w.url for w in stack.workers), *engines]}
    async with prometheus(stack.http, tmp_path, targets) as server:
        sent = {resolved(expr, server.target): expr for _, _, expr in QUERIES}
        silent = [*NO_DATA, *([] if REDIS else ["warmroute_replicas_"])]
        quiet = {expr for expr in sent.values() if any(name in expr for name in silent)}
        await server.until_data(asks for asks, expr in sent.items() if expr not in quiet)
        for asks in sent:
            await server.query(asks)  # queries without data must parse, too
        await labels_are_those_of_the_legends(server)
        await server.until_data(rule["name"] for rule in await server.rules("record"))
        alerts = await server.rules("alert")
        metrics = {name for rule in alerts for name in re.findall(METRIC, rule["query"])}
        # The alerts have data to evaluate.
        await server.until_data(m for m in metrics if not m.startswith(tuple(silent)))
        rules = [*await server.rules("record"), *alerts]
        assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
        assert {rule["health"] for rule in rules} == {"ok"}
        # The regular expressions of labels must match, not only parse.
        (ready,) = await server.query(
            f'sum(warmroute_worker_state{{instance="{server.target}", state="ready"}})'
        )
        assert float(ready["value"][1]) >= 2


async def test_panels_stay_readable_with_hundreds_of_workers(stack, tmp_path) -> None:
    """Panels stay readable with hundreds of workers: the test copies the first worker's metrics for
    300 workers, five times what a panel may show.
    """
    text = await exposition(stack)
    like = [line for line in text.splitlines() if 'worker="0"' in line]
    assert len(like) > 30
    more = (line.replace('worker="0"', f'worker="{n}"') for n in range(100, 400) for line in like)
    crowd = "\n".join([*text.splitlines(), *more, ""])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=crowd)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with (
        TestServer(app) as crowded,
        prometheus(
            stack.http, tmp_path, {"warmroute": [f"http://{crowded.host}:{crowded.port}"]}, "2s"
        ) as server,
    ):
        await server.until_data(["count(warmroute_worker_requests) > 300"])
        for dashboard, title, expr in QUERIES:
            if dashboard != "engine":
                rows = await server.query(resolved(expr, server.target))
                assert len(rows) <= 60, (dashboard, title, len(rows))


async def send_completion(http: aiohttp.ClientSession, url: str) -> None:
    async with http.get(f"{url}/v1/models") as reply:
        model = (await reply.json())["data"][0]["id"]
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()


async def labels_are_those_of_the_legends(server) -> None:
    """Check that the series have each label that a legend names, since the legend would otherwise
    show an empty name.

    The label `why` is empty on purpose if there is nothing to explain.
    """
    for panel in PANELS.values():
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"why"}
            rows = await server.query(resolved(target["expr"], server.target))
            assert all(wanted <= set(row["metric"]) for row in rows), panel["title"]
            if not wanted:
                assert len(rows) <= 1, (panel["title"], "several series of one name", rows)
