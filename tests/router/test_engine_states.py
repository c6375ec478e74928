"""What engines are like while they serve: slow to say that they live, asleep, not ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router.assembly import Router
from router.config.schema import Config, Intervals, Timeouts
from router.config.worker_spec import parse_worker_spec
from router.fleet.member import Member
from tests.router.engine_pages import engine
from tests.router.test_engines_sglang import SGLANG
from tests.router.test_engines_triton import BACKEND, FRESH_BACKEND, TRITON
from tests.router.test_recognize import METRICS, VLLM
from tests.router.waiting import until

PROBE_S, HEALTH_S = 0.1, 0.05
SLEEP = 'vllm:engine_sleep_state{engine="0",sleep_state="%s"} 1\n'


@asynccontextmanager
async def followed(pages: dict[str, Any], asked: list[str]) -> AsyncIterator[Member]:
    """A worker with these pages, as soon as it is ready."""
    config = Config(
        intervals=Intervals(load_report_s=0.05, health_s=HEALTH_S),
        timeouts=Timeouts(probe_s=PROBE_S),
    )
    async with engine(pages, asked) as url, aiohttp.ClientSession() as http:
        router = Router(config, http)
        try:
            member = router.fleet.add(parse_worker_spec(url))
            await until(lambda: member.ready, "it to be ready")
            yield member
        finally:
            await router.aclose()


async def test_an_engine_that_takes_its_time_to_answer_a_probe_is_given_it() -> None:
    """SGLang's waits for its scheduler: longer than others may take."""
    asked: list[str] = []

    async def slow() -> str:
        await asyncio.sleep(3 * PROBE_S)
        return "ok"

    async with followed({**SGLANG, "/health": slow}, asked) as member:
        await until(lambda: asked.count("/health") > 3, "some probes")
        assert member.ready
        assert member.trouble == ""


async def test_another_engine_that_takes_so_long_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    async def slow() -> str:
        await asyncio.sleep(3 * PROBE_S)
        return "ok"

    async with followed({**VLLM, "/health": slow}, asked):
        await until(lambda: "is down: GET /health: " in caplog.text, "it to be down")


async def test_an_engine_put_to_sleep_is_down_until_it_wakes() -> None:
    pages = {**VLLM, "/health": "ok", "/metrics": METRICS + SLEEP % "awake"}
    async with followed(pages, []) as member:
        pages["/metrics"] = METRICS + SLEEP % "weights_offloaded"
        await until(lambda: "sleeps; POST /wake_up" in member.trouble, "it to sleep")
        assert not member.ready
        pages["/metrics"] = METRICS + SLEEP % "awake"
        await until(lambda: member.ready, "it to wake")


async def test_triton_says_by_400_that_it_is_not_ready() -> None:
    pages = {**TRITON, "/v2/health/ready": "", "/health": "fine"}
    async with followed(pages, []) as member:
        pages["/v2/health/ready"] = 400
        await until(lambda: "not ready: GET /v2/health/ready" in member.trouble, "it to be down")
        assert not member.ready
        pages["/v2/health/ready"] = "ok"
        await until(lambda: member.ready, "it to be ready again")


async def test_advice_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    pages = {**SGLANG, "/health": "ok", "/server_info": {**SGLANG["/server_info"], "page_size": 1}}
    async with followed(pages, []) as member:
        pages["/v1/models"] = pages["/health"] = 503
        await until(lambda: "/v1/models answered 503" in member.trouble, "it to be down")
        pages["/v1/models"], pages["/health"] = SGLANG["/v1/models"], "ok"
        await until(lambda: member.ready, "it to be back")
        assert caplog.text.count("give it --page-size 16 or more") == 1


async def test_a_triton_that_has_run_tells_how_large_its_blocks_are() -> None:
    pages = {**TRITON, "/metrics": FRESH_BACKEND}
    async with followed(pages, []) as member:
        assert member.recognized is not None
        assert not member.recognized.sized
        pages["/metrics"] = BACKEND
        await until(lambda: member.recognized.sized, "it to be asked again")
        assert member.recognized.facts.block_size == 64
        assert member.recognized.facts.kv_capacity_tokens == 64_000
