"""Who is behind a URL: real HTTP servers that answer as engines do, or badly on purpose."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.wire import WireError
from policies.facts import WorkerFacts
from router.fleet_io.recognize import (
    MAX_METRICS_BYTES,
    MAX_REPLY_BYTES,
    Recognized,
    UnrecognizedError,
    recognize,
    scrape,
    usable,
)
from router.worker_spec import parse_worker_spec
from tests.router.core_world import World

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 8192}]}
METRICS = """\
# HELP vllm:num_requests_running Running.
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="1000",engine="0"} 1.0
"""
SGLANG_METRICS = """\
sglang:num_running_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
"""
SOURCES = {
    "0": {
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://0.0.0.0:5558",
        "topic": "kv",
        "buffer_steps": 10_000,
    }
}
Pages = Mapping[str, Any]


@asynccontextmanager
async def engine(pages: Pages) -> AsyncIterator[str]:
    """An engine that serves `pages`: JSON, text, bytes, or a status alone."""

    async def answer(request: web.Request) -> web.Response:
        page = pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        if isinstance(page, int):
            return web.Response(status=page, headers={"Location": "/v1/models"})
        if isinstance(page, str | bytes):
            return web.Response(body=page)
        return web.json_response(page)

    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def recognized(pages: Pages, options: str = "") -> Recognized:
    async with engine(pages) as url, aiohttp.ClientSession() as http:
        return await recognize(http, parse_worker_spec(url + options), 5.0)


VLLM: Pages = {"/v1/models": MODELS, "/metrics": METRICS}


async def test_a_vllm_without_event_sources_is_served_without_events() -> None:
    one = await recognized(VLLM)
    assert (one.kind, one.source, one.reports_load) == ("vllm", None, True)
    facts = one.facts
    assert (facts.models, facts.block_size, facts.has_events) == (("m",), 32, False)
    assert (facts.kv_capacity_tokens, facts.max_model_tokens) == (32_000, 8192)


async def test_endpoints_bound_to_every_address_are_reached_at_the_workers_own() -> None:
    one = await recognized({**VLLM, "/kv_event_sources": SOURCES})
    assert one.source is not None
    assert one.source.live == "tcp://127.0.0.1:5557"
    assert one.source.replay == "tcp://127.0.0.1:5558"
    assert (one.source.topic, one.source.snapshot) == ("kv", None)
    assert one.facts.has_events


async def test_an_engine_without_vllms_metrics_is_served_without_load_reports() -> None:
    for metrics in (SGLANG_METRICS, 404, "", "vllm:num_requests_running nonsense\n"):
        one = await recognized({"/v1/models": MODELS, "/metrics": metrics})
        assert (one.kind, one.reports_load, one.facts.block_size) == ("openai", False, 16)
        assert math.isnan(one.facts.kv_capacity_tokens)


async def test_our_own_engine_has_a_snapshot() -> None:
    models = {"data": [{"id": "m", "owned_by": "warmroute"}]}
    pages = {**VLLM, "/v1/models": models, "/kv_event_sources": SOURCES}
    one = await recognized(pages)
    assert one.kind == "warmroute"
    assert one.source is not None
    assert str(one.source.snapshot).endswith("/kv_snapshot")


async def test_adapters_are_told_from_their_base_and_from_its_other_names() -> None:
    cards = [{"id": "m"}, {"id": "alias"}, {"id": "tuned", "parent": "m"}]
    one = await recognized({**VLLM, "/v1/models": {"data": cards}})
    assert one.facts.models == ("m", "alias", "tuned")
    assert one.facts.adapters == {"tuned"}
    world = World(workers=0)
    world.join(0, models=one.facts.models, adapters=one.facts.adapters)
    asked = ("m", "alias", "tuned", "unknown")
    assert [world.core.workers.identity(model) for model in asked] == [
        ("m", None),
        ("m", None),
        ("m", "tuned"),
        ("unknown", None),
    ]


async def test_what_the_operator_wrote_wins() -> None:
    options = (
        ",kind=vllm,model=only,block_size=64,events=tcp://h:1,replay=tcp://h:2,role=decode"
        ",max_requests=7,max_queued_tokens=9000,max_kv_fraction=0.9,weight=2"
    )
    one = await recognized({**VLLM, "/kv_event_sources": SOURCES}, options)
    facts = one.facts
    assert one.source is not None
    assert (one.source.live, one.source.replay) == ("tcp://h:1", "tcp://h:2")
    assert (facts.models, facts.block_size, facts.role) == (("only",), 64, "decode")
    assert (facts.max_requests, facts.max_queued_tokens) == (7, 9000)
    assert (facts.max_kv_fraction, facts.weight) == (0.9, 2)
    without = await recognized({**VLLM, "/kv_event_sources": SOURCES}, ",events=none")
    assert without.source is None


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"/v1/models": 500}, "answered 500"),
        ({"/v1/models": 302}, "answered 302"),  # nobody sends us elsewhere
        ({"/v1/models": "<html>"}, "not a list of models"),
        ({"/v1/models": {"data": []}}, "lists no model"),
        ({"/v1/models": {"data": [{"id": 5}]}}, "not a list of models"),
        ({"/v1/models": {"data": [{"id": str(n)} for n in range(1025)]}}, "more than 1024"),
        ({"/v1/models": b" " * (MAX_REPLY_BYTES + 1)}, "more than"),
        ({"/v1/models": b'{"data":' + b"[" * 100_000}, "not a list of models"),
        ({**VLLM, "/kv_event_sources": "[]"}, "kv_event_sources"),
        ({**VLLM, "/metrics": METRICS.replace('"32"', '"99999"')}, "99999 tokens"),
    ],
)
async def test_nonsense_is_refused_with_what_it_was(pages: Pages, says: str) -> None:
    with pytest.raises((UnrecognizedError, WireError), match=says):
        await recognized(pages)


@pytest.mark.parametrize(
    "endpoint",
    ["", "x", "inproc://a", "tcp://h", "tcp://h:0", "tcp://h:99999", "pgm://h:1", "tcp://a b:1"],
)
async def test_event_endpoints_that_cannot_be_used_cost_the_events_only(endpoint: str) -> None:
    sources = {"0": {"endpoint": endpoint, "replay_endpoint": None}}
    one = await recognized({**VLLM, "/kv_event_sources": sources})
    assert one.source is None
    assert not one.facts.has_events
    if endpoint.startswith("tcp://") and " " not in endpoint:
        with pytest.raises(UnrecognizedError, match="events"):
            await recognized(VLLM, f",events={endpoint}")


def test_usable_endpoints() -> None:
    for endpoint in ("tcp://h:1", "tcp://[::1]:65535", "tcp://10.0.0.1:5557", "ipc:///run/x.sock"):
        assert usable(endpoint), endpoint


@pytest.mark.parametrize(
    "metrics",
    [
        b"#" * (MAX_METRICS_BYTES + 1),
        METRICS.replace("2.0", "1e308") + "vllm:num_requests_running 1e308\n",
        METRICS.replace("2.0", "NaN"),
        METRICS.replace("2.0", "-1"),
        b"\xff\x00",
    ],
    ids=["long", "overflow", "nan", "negative", "binary"],
)
async def test_hostile_metrics_are_one_kind_of_error(metrics: str | bytes) -> None:
    async with engine({"/metrics": metrics}) as url, aiohttp.ClientSession() as http:
        with pytest.raises(WireError):
            await scrape(http, url, aiohttp.ClientTimeout(total=5))


async def test_a_load_report_is_read_whole() -> None:
    async with engine(VLLM) as url, aiohttp.ClientSession() as http:
        load = await scrape(http, url, aiohttp.ClientTimeout(total=5))
    assert (load.running, load.waiting, load.kv_usage) == (2, 1, 0.5)
    assert json.dumps(load.kv_capacity_tokens) == "32000"


def test_the_line_of_a_worker_stays_one_line_whatever_its_models_are_called():
    names = ("tiny", "bad\nname", *(f"adapter-{n}" for n in range(9)))
    facts = WorkerFacts(name="w", models=names, block_size=16, has_events=False)
    assert str(Recognized("vllm", facts, None, True)) == (
        "kind vllm, models tiny bad\\nname adapter-0 adapter-1 adapter-2 6 more, "
        "block size 16, KV tokens unknown, events no"
    )
