"""Tests of TensorRT-LLM's `trtllm-serve`: answers that can be read only once, several ranks that
are one worker, and polled events.
"""

from __future__ import annotations

import math

import aiohttp
import pytest

from engine.wire.events import WireError
from router.engines.adapter import LoadReader
from router.engines.trtllm import loads_in, newest_in
from router.events.sources import PollSource, ZmqSource
from tests.router.engines.engine_pages import engine, loads_of, recognized
from tests.router.engines.trtllm_pages import NEW, OLD, iteration

CREATED = {
    "event_id": 0,
    "window_size": 4096,
    "data": {"type": "created", "num_blocks_per_cache_level": [1000, 0]},
}


async def test_trtllm_is_recognized_by_its_list_of_models() -> None:
    one = await recognized(OLD)
    assert (one.kind, one.source, one.ranks) == ("trtllm", None, (0,))
    assert one.loads.loads_in is newest_in
    assert (one.facts.block_size, one.facts.has_events) == (64, False)
    assert math.isnan(one.facts.kv_capacity_tokens)
    assert "events=poll" in one.advice


async def test_newer_releases_report_block_size_and_capacity() -> None:
    one = await recognized(NEW)
    assert one.loads.loads_in is loads_in
    assert (one.facts.block_size, one.facts.kv_capacity_tokens) == (64, 64_000)
    (load,) = (await loads_of(NEW)).values()
    assert (load.running, load.waiting, load.kv_used_tokens) == (3, 1, 16_000)


async def test_events_are_polled_once_and_only_from_a_recognized_trtllm() -> None:
    asked: list[str] = []
    one = await recognized({**OLD, "POST /kv_cache_events": [CREATED]}, asked=asked)
    assert isinstance(one.source, PollSource)
    assert one.source.url.endswith("/kv_cache_events")
    assert one.advice == ""
    assert asked.count("POST /kv_cache_events") == 1
    asked.clear()
    await recognized({"/v1/models": {"data": [{"id": "m"}]}}, asked=asked)
    assert not [key for key in asked if key.startswith("POST")]


@pytest.mark.parametrize("events", ["poll", "none", "tcp://h:5557"])
async def test_events_are_not_probed_if_configured(events: str) -> None:
    asked: list[str] = []
    one = await recognized(OLD, f",events={events}", asked=asked)
    assert "POST /kv_cache_events" not in asked
    assert one.advice == ""
    kinds = {"poll": PollSource, "none": type(None), "tcp://h:5557": ZmqSource}
    assert isinstance(one.source, kinds[events])


@pytest.mark.parametrize("page", [404, 500, [], "", "<html>", {"error": "off"}])
async def test_without_events_in_the_answer_the_engine_has_no_event_source(page: object) -> None:
    one = await recognized({**OLD, "POST /kv_cache_events": page})
    assert one.source is None


async def test_the_newest_iteration_counts_and_ranks_are_summed() -> None:
    pages = {**OLD, "/metrics": [iteration(9, 9), iteration(2, 1)]}
    (load,) = (await loads_of(pages)).values()
    assert (load.running, load.waiting, load.kv_used_tokens, load.kv_usage) == (2, 1, 3_200, 0.1)
    ranked = [
        iteration(9, 0, attentionDpRank=1),
        iteration(2, 1, attentionDpRank=0),
        iteration(4, 3, attentionDpRank=1),
    ]
    (load,) = (await loads_of({**OLD, "/metrics": ranked})).values()
    assert (load.running, load.waiting, load.kv_used_tokens) == (6, 4, 6_400)


async def test_no_iteration_since_the_last_poll_does_not_mean_idle() -> None:
    assert await loads_of(OLD) == {}


async def test_an_iteration_without_cache_values_still_gives_request_counts() -> None:
    pages = {**OLD, "/metrics": [{"numActiveRequests": 2}]}
    (load,) = (await loads_of(pages)).values()
    assert (load.running, load.waiting) == (2, 0)
    assert math.isnan(load.kv_used_tokens)


async def test_metrics_that_are_not_a_json_array_are_not_used() -> None:
    for page in (404, "", "process_cpu_seconds_total 1\n", {"error": "x"}):
        assert (await recognized({**OLD, "/metrics": page})).loads is None


@pytest.mark.parametrize(
    "page",
    [
        [iteration(-1, 0)],
        [iteration(1, 10**13)],
        [iteration(1, 0, attentionDpRank=9_999)],
        [iteration(1, 0, kvCacheStats={"usedNumBlocks": 9, "maxNumBlocks": 3})],
        [{"numQueuedRequests": 1}],
        b'[{"numActiveRequests": NaN}]',
        b'[{"numActiveRequests": 1}',
        500,
    ],
)
async def test_impossible_iterations_are_refused(page: object) -> None:
    async with engine({"/metrics": page}) as url, aiohttp.ClientSession() as http:
        reader = LoadReader(f"{url}/metrics", newest_in)
        with pytest.raises(WireError):
            await reader.read(http, aiohttp.ClientTimeout(total=5.0))


async def test_an_impossible_block_size_is_refused() -> None:
    with pytest.raises(WireError, match="/server_info"):
        await recognized({**NEW, "/server_info": {"tokens_per_block": -32}})
