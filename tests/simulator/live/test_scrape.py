"""Tests of reading counters, from real pages of metrics and over real HTTP."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simulator.live.scrape import (
    Sample,
    ScrapeError,
    fetch_workers,
    metric_totals,
    sample_forever,
    worker_counters,
)
from tests.simulator.endpoint import until

PAGE = """\
# HELP vllm:num_requests_running running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} c"} 2.0
vllm:num_requests_running{engine="1",model_name="demo"} 3
vllm:prefix_cache_hits_total{model_name="demo"} 1.2e3
vllm:prefix_cache_queries_total{model_name="demo"} 4800
warmroute_engine_steps_total 7
"""


def test_series_of_one_name_are_summed() -> None:
    counters = worker_counters(metric_totals(PAGE))
    assert counters.running == 5
    assert counters.hit_tokens == 1200
    assert counters.query_tokens == 4800
    assert counters.steps == 7
    assert counters.waiting == 0


def test_metric_totals_agree_with_the_prometheus_client() -> None:
    registry = CollectorRegistry()
    Gauge("load", "load", ["worker"], registry=registry).labels("a").set(2)
    Counter("done", "done", registry=registry).inc(5)
    Histogram("wait", "wait", registry=registry).observe(0.3)
    totals = metric_totals(generate_latest(registry).decode())
    assert totals["load"] == 2
    assert totals["done_total"] == 5
    assert totals["wait_count"] == 1


def test_a_page_that_is_not_metrics_is_refused() -> None:
    with pytest.raises(ValueError):
        metric_totals("<html>not metrics</html>")


async def test_counters_are_scraped_over_http() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            assert [c.running for c in await fetch_workers(session, [url, url])] == [5, 5]
            samples: list[Sample] = []
            sampling = asyncio.ensure_future(sample_forever(session, [url], 0.01, samples))
            await until(lambda: len(samples) >= 3)
            sampling.cancel()
            assert samples[0].at_s < samples[1].at_s < samples[2].at_s
            with pytest.raises(ScrapeError, match="HTTP 404"):
                await fetch_workers(session, [url + "/elsewhere"])
    finally:
        await runner.cleanup()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ScrapeError, match=url):
            await fetch_workers(session, [url])
