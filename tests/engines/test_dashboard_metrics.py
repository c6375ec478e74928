"""Tests that engines export the metrics that dashboards query, as the recorded pages do."""

from __future__ import annotations

import re

import aiohttp
import pytest

from tests.engines.pool import Pool
from tests.engines.triton_server import TritonServer
from tests.engines.vllm_server import MODEL
from tests.grafana.shown import PAGES, PANELS, targets

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Metrics that these servers have no reason to export.
NOT_EXPORTED = {
    "vllm:nixl_num_kv_expired_reqs_total": "no KV goes between them",
    "vllm:nixl_num_failed_transfers_total": "no KV goes between them",
    "sglang:num_aborted_requests_total": "from the first one on",
    "sglang:num_retracted_requests_total": "from the first one on",
}
SINCE = {"vllm:admission_rejections_total": (0, 32)}


def queried_metrics(prefix: str) -> set[str]:
    """Return the names of an engine's metrics that the panels of all dashboards query."""
    exprs = " ".join(expr for panel in PANELS.values() for expr in targets(panel))
    return set(re.findall(rf"\b{prefix}\w+", exprs))


def metric_names(page: str) -> set[str]:
    """Return the names of all samples on a metrics page."""
    return {
        line.partition("{")[0].partition(" ")[0]
        for line in page.splitlines()
        if line and not line.startswith("#")
    }


async def page_of(url: str) -> str:
    async with aiohttp.request("GET", url) as reply:
        assert reply.status == 200
        return await reply.text()


async def check_metrics(pool: Pool, prefix: str, recorded: str) -> None:
    """Check that the first server and the recorded page both export every metric that
    panels query.
    """
    body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 4, "stream": True}
    for _ in range(2):  # SGLang counts cached tokens from the first hit on
        status, _ = await pool.servers[0].post("/v1/completions", body)
        assert status == 200
    wanted = {name for name in queried_metrics(prefix) if name not in NOT_EXPORTED}
    release = pool.environment.release
    wanted -= {name for name, since in SINCE.items() if release[: len(since)] < since}
    assert len(wanted) > 10
    assert wanted - metric_names(await page_of(f"{pool.servers[0].url}/metrics")) == set()
    assert (
        queried_metrics(prefix) - set(NOT_EXPORTED) - metric_names((PAGES / recorded).read_text())
        == set()
    )


async def test_vllm_exports_the_metrics_that_panels_query(vllm: Pool) -> None:
    await check_metrics(vllm, "vllm:", "vllm.txt")


async def test_sglang_exports_the_metrics_that_panels_query(sglang: Pool) -> None:
    await check_metrics(sglang, "sglang:", "sglang.txt")


async def test_triton_exports_the_metrics_that_panels_query(triton: Pool) -> None:
    server = triton.servers[0]
    assert isinstance(server, TritonServer)
    told = metric_names(await page_of(server.metrics_url))
    assert queried_metrics("nv_") - told == set()
    assert queried_metrics("nv_") - metric_names((PAGES / "triton.txt").read_text()) == set()
