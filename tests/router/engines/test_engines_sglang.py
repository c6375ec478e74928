"""Tests of several versions of SGLang: recognition, ranks, and three formats of load."""

from __future__ import annotations

import json
import math

import pytest

from engine.wire.events import WireError
from router.engines.adapter import EngineVersion, LoadReader
from router.engines.sglang import loads_in, old_loads_in, v1_loads_in
from router.engines.version import version_in
from router.events.sources import ZmqSource
from tests.router.engines.engine_pages import MODELS, engine, loads_of, recognized
from tests.router.sglang_pages import EVENTS, INFO, LOADS, METRICS, SGLANG


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_is_recognized_by_its_server_info_at_both_paths(path: str) -> None:
    one = await recognized({"/v1/models": MODELS, path: INFO})
    assert (one.kind, one.source, one.loads, one.ranks) == ("sglang", None, None, (0,))
    assert (one.facts.block_size, one.facts.kv_capacity_tokens) == (64, 400_000)
    assert one.health.least_s >= 1
    assert one.advice == ""


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_the_models_revision_is_not_part_of_the_engines_version(path: str) -> None:
    """SGLang's revision is the version of the model and not of SGLang: the router reads the same
    one when it recognizes the server and when it asks before a disaggregated request.
    """
    info = {**INFO, "version": "0.5.6", "revision": "main"}
    one = await recognized({"/v1/models": MODELS, path: info})
    assert one.reported_version == EngineVersion("0.5.6", None, path)
    assert version_in(json.dumps(info).encode(), path) == one.reported_version
    assert version_in(b'{"version": "1", "revision": "v2"}', "/version").revision == "v2"


async def test_server_info_of_another_engine_is_not_taken_for_sglang() -> None:
    for other in ({"vllm_config": "..."}, {"disaggregated_params": None}, [1], "text"):
        one = await recognized({"/v1/models": MODELS, "/server_info": other})
        assert one.kind == "openai"


async def test_each_rank_has_its_own_event_ports_and_the_block_size_of_events() -> None:
    pages = {**SGLANG, "/server_info": {**INFO, "dp_size": 2, "kv_events": EVENTS}}
    both = await recognized(pages)
    assert (both.ranks, both.facts.block_size, both.source) == ((0, 1), 64, None)
    assert both.facts.kv_capacity_tokens == 800_000
    one = await recognized(pages, ",rank=1")
    assert one.source == ZmqSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", topic="kv")
    assert (one.address, one.facts.kv_capacity_tokens) == (1, 400_000)


async def test_blocks_of_one_token_work_but_are_advised_against() -> None:
    pages = {**SGLANG, "/server_info": {**INFO, "page_size": 1}}
    one = await recognized(pages)
    assert one.facts.block_size == 64  # of our guesses, for it tells no events
    assert "--page-size" in one.advice
    assert "--page-size" not in (await recognized(pages, ",block_size=1")).advice


async def test_loads_are_read_from_v1_loads() -> None:
    assert (await recognized(SGLANG)).loads.loads_in is v1_loads_in
    loads = await loads_of(SGLANG)
    assert {r: (x.running, x.waiting) for r, x in loads.items()} == {0: (3, 2), 1: (4, 2)}
    assert (loads[1].kv_used_tokens, loads[1].kv_usage) == (120_000, 0.3)


@pytest.mark.parametrize("page", [[{"dp_rank": 0}, {"dp_rank": 1}], {}], ids=["list", "object"])
async def test_get_load_counts_waiting_requests_among_all_requests(page: object) -> None:
    """`/get_load` counts waiting requests among all requests; its answer is a list up to 0.5.20,
    and one object in 0.4.8.
    """
    load = {"num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9_000}
    page = [{**load, **one} for one in page] if isinstance(page, list) else load
    pages = {"/v1/models": MODELS, "/server_info": INFO, "/get_load": page}
    assert (await recognized(pages)).loads.loads_in is old_loads_in
    loads = await loads_of(pages)
    assert len(loads) == (2 if isinstance(page, list) else 1)
    assert (loads[0].running, loads[0].waiting) == (3, 2)
    assert math.isnan(loads[0].kv_used_tokens)  # prompts that wait are counted in it


async def test_get_load_gives_the_used_tokens_while_no_request_waits() -> None:
    page = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 0, "num_tokens": 9_000}]
    loads = await loads_of({"/v1/models": MODELS, "/server_info": INFO, "/get_load": page})
    assert (loads[0].running, loads[0].kv_used_tokens) == (5, 9_000)


async def test_load_comes_from_prometheus_without_newer_pages_or_if_configured() -> None:
    pages = {"/v1/models": MODELS, "/server_info": INFO, "/metrics": METRICS}
    assert (await recognized(pages)).loads.loads_in is loads_in
    loads = await loads_of(pages)
    assert {r: (x.running, x.waiting) for r, x in loads.items()} == {0: (3, 2), 1: (4, 0)}
    assert (loads[0].kv_usage, loads[1].kv_used_tokens) == (0.3, 240_000)
    async with engine({"/elsewhere": METRICS}) as url:
        one = await recognized(SGLANG, f",metrics={url}/elsewhere")
        assert one.loads == LoadReader(f"{url}/elsewhere", loads_in)


async def test_a_configured_kind_sglang_is_used_whatever_the_engine_answers() -> None:
    one = await recognized({"/v1/models": MODELS}, ",kind=sglang,block_size=64,kv_tokens=1000")
    assert (one.kind, one.loads, one.facts.block_size) == ("sglang", None, 64)
    assert one.facts.kv_capacity_tokens == 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("page_size", -1),
        ("page_size", 1 << 40),
        ("dp_size", 0),
        ("dp_size", 5_000),
        ("max_total_num_tokens", -5),
        ("max_total_num_tokens", 10**15),
        ("page_size", "16"),
        ("kv_events", {**EVENTS, "endpoint_port_base": 0}),
    ],
)
async def test_impossible_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(WireError, match="/server_info"):
        await recognized({**SGLANG, "/server_info": {**INFO, key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_running_reqs", -1),
        ("num_running_reqs", 1.5),
        ("num_waiting_reqs", 10**13),
        ("num_used_tokens", -1),
        ("token_usage", 7.0),
        ("token_usage", -0.1),
        ("dp_rank", 9_999),
    ],
)
async def test_impossible_loads_are_refused(key: str, value: object) -> None:
    load = {**LOADS["loads"][0], key: value}  # type: ignore[dict-item]
    with pytest.raises(WireError):
        await loads_of({**SGLANG, "/v1/loads": {"loads": [load]}})


@pytest.mark.parametrize(
    "page", [b'{"loads": [', b'{"loads": [{"num_running_reqs": NaN}]}', b"[" * 100_000, b"\xff"]
)
async def test_a_load_page_that_is_not_json_is_not_used(page: bytes) -> None:
    one = await recognized({**SGLANG, "/v1/loads": page})
    assert (one.kind, one.loads) == ("sglang", None)


@pytest.mark.parametrize(
    ("state", "model", "left_out"),
    [
        ({"token_capacity_swa": 9_000}, "gpt_oss", True),
        ({"token_capacity_swa": None}, "gpt_oss", False),  # --disable-hybrid-swa-memory
        ({"token_capacity_swa": None}, "qwen3_next", True),
        ({}, "gpt_oss", True),  # an older release, which does not say
        ({}, "llama", False),
    ],
)
async def test_caches_that_events_leave_out_are_noticed(
    state: dict[str, int | None], model: str, left_out: bool
) -> None:
    info = {**INFO, "kv_events": EVENTS, "internal_states": [{"memory_usage": state}]}
    pages = {**SGLANG, "/server_info": info, "/model_info": {"model_type": model}}
    assert (await recognized(pages, ",rank=0")).leaves_out_groups == left_out


@pytest.mark.parametrize("page", ["text", [1], {"model_type": 5}])
async def test_an_invalid_model_page_is_ignored(page: object) -> None:
    pages = {**SGLANG, "/server_info": {**INFO, "kv_events": EVENTS}, "/model_info": page}
    assert not (await recognized(pages, ",rank=0")).leaves_out_groups


async def test_disabled_prefix_caching_is_noticed() -> None:
    assert (await recognized(SGLANG)).caches_prefixes
    pages = {**SGLANG, "/server_info": {**INFO, "disable_radix_cache": True}}
    assert not (await recognized(pages)).caches_prefixes
