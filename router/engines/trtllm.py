"""The adapter of TensorRT-LLM's `trtllm-serve`, 1.0 and later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.wire.events import WireError
from engine.wire.metrics import samples
from router.body.legs import Trtllm
from router.body.paths import KSERVE_PATHS, OPTIONAL_PATHS
from router.engines.adapter import (
    Adapter,
    Count,
    ExactnessFlags,
    Interview,
    LoadReader,
    Profile,
    Rank,
    RankLoad,
    Size,
    cards,
    decoded,
    share,
    total,
)
from router.engines.version import version_of
from router.events.sources import PollSource

EVENTS_PATH = "/kv_cache_events"
_BLOCK_SIZE = 32  # tokens, its default
_RUNNING, _WAITING = "trtllm_num_requests_running", "trtllm_num_requests_waiting"
_USAGE, _USED = "trtllm_kv_cache_utilization", "trtllm_kv_cache_used_blocks"
_MAX, _TOKENS = "trtllm_kv_cache_max_blocks", "trtllm_kv_cache_tokens_per_block"
_GAUGES = (_RUNNING, _WAITING, _USAGE, _USED, _MAX, _TOKENS)
_NO_EVENTS = (
    "it had no KV events to give: where event_buffer_max_size is set, give this worker events=poll"
)


class _TrtllmInfo(msgspec.Struct):
    tokens_per_block: Size | None = None


class _Cache(msgspec.Struct, rename="camel"):
    max_num_blocks: Count | None = None
    used_num_blocks: Count | None = None
    tokens_per_block: Count | None = None


class _Iteration(msgspec.Struct, rename="camel"):
    num_active_requests: Count
    num_queued_requests: Count = 0
    attention_dp_rank: Rank | None = None
    kv_cache_stats: _Cache | None = None


_Iterations = Annotated[list[_Iteration], Meta(max_length=1 << 16)]


def newest_in(text: str) -> Mapping[int, RankLoad]:
    """Return the newest load of each rank among the iterations since the last `GET /metrics`. The
    result is empty if there were no iterations. Raises WireError for a malformed answer.
    """
    iterations: list[_Iteration] = decoded(text, _Iterations, "/metrics")
    newest = {i.attention_dp_rank or 0: _load_of(i) for i in iterations}
    return {0: total(newest.values())} if newest else {}


def _load_of(iteration: _Iteration) -> RankLoad:
    cache = iteration.kv_cache_stats or _Cache()
    used, size, most = cache.used_num_blocks, cache.tokens_per_block, cache.max_num_blocks
    return RankLoad(
        running=iteration.num_active_requests,
        waiting=iteration.num_queued_requests,
        kv_used_tokens=math.nan if used is None or not size else float(used * size),
        kv_usage=share(used / most, "usedNumBlocks") if used is not None and most else math.nan,
    )


def loads_in(text: str) -> Mapping[int, RankLoad]:
    """Return the load in the gauges at `/prometheus/metrics`, which the engine has if it runs with
    `return_perf_metrics`.
    """
    return {0: load_in(_gauges(text))}


def _gauges(text: str) -> dict[str, float]:
    return {sample.name: sample.value for sample in samples(text, _GAUGES)}


def load_in(gauges: Mapping[str, float]) -> RankLoad:
    """Return the load in the gauges. Raises WireError if there is none."""
    if not {_RUNNING, _WAITING} <= gauges.keys():
        raise WireError(f"metrics without {_RUNNING} and {_WAITING}")
    used, size = gauges.get(_USED, math.nan), gauges.get(_TOKENS, math.nan)
    return RankLoad(
        running=int(gauges[_RUNNING]),
        waiting=int(gauges[_WAITING]),
        kv_used_tokens=used * size,
        kv_usage=share(gauges.get(_USAGE), _USAGE),
    )


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    if not named and (await cards(talk))[0].owned_by != "tensorrt_llm":
        return None
    status, body = await talk.get("/server_info")
    info = decoded(body, _TrtllmInfo, "/server_info") if status == 200 else _TrtllmInfo()
    reader, gauges = await _reader(talk)
    size = info.tokens_per_block or int(gauges.get(_TOKENS, 0)) or None
    capacity = int(gauges.get(_MAX, 0)) * (size or _BLOCK_SIZE)
    source = await _source(talk)
    return Profile(
        block_size=size,
        usual_block_size=_BLOCK_SIZE,
        kv_tokens={0: capacity} if capacity else {},
        sources={} if source is None else {0: source},
        loads=reader,
        reported_version=await version_of(talk),
        advice="" if source is not None or talk.spec.events is not None else _NO_EVENTS,
    )


async def _reader(talk: Interview) -> tuple[LoadReader | None, Mapping[str, float]]:
    """Return how to read the engine's load, and the engine's gauges if it has any. Gauges are
    preferred, because no data are lost when they are read.
    """
    url = talk.spec.metrics or f"{talk.spec.url}/prometheus/metrics"
    try:
        status, body = await talk.get_url(url)
        gauges = _gauges(body.decode("utf-8", "replace")) if status == 200 else {}
        load_in(gauges)
    except WireError:
        path = talk.spec.metrics or f"{talk.spec.url}/metrics"
        status, body = await talk.get_url(path)
        return (LoadReader(path, newest_in) if status == 200 and body[:1] == b"[" else None), {}
    return LoadReader(url, loads_in), gauges


async def _source(talk: Interview) -> PollSource | None:
    """Return the source of the engine's KV events, or None if it has none. If the operator did not
    say whether there are events, request them once; the events in that answer are lost.
    """
    if talk.spec.events is not None:
        return None
    status, body = await talk.post(EVENTS_PATH)
    if status != 200 or body.strip()[:2] in (b"", b"[]") or body[:1] != b"[":
        return None
    return PollSource(f"{talk.spec.url}{EVENTS_PATH}")


ADAPTER = Adapter(
    "trtllm",
    _recognize,
    # By the HTTP server of TensorRT-LLM 1.2.
    lacks=KSERVE_PATHS | (OPTIONAL_PATHS - {"/v1/responses", "/v1/embeddings"}),
    takes_prompt_ids=True,
    chat_ids="prompt_token_ids",
    transfer=Trtllm(),
    flags=ExactnessFlags(
        caching="enable_block_reuse: true in kv_cache_config",
        events="event_buffer_max_size: 16384 in kv_cache_config, and events=poll of the worker",
        replay="kv_events_config of a newer release, which pushes events and can repeat them",
    ),
)
