"""The adapter of SGLang 0.4.8 to 0.5.23. SGLang's `/server_info` has almost all properties. SGLang
has had three formats of its load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.wire.events import WireError
from engine.wire.metrics import label_rank, samples
from policies.facts import Role
from router.body.legs import BootstrapAddress, Rooms
from router.body.paths import KSERVE_PATHS
from router.engines.adapter import (
    NO_VERSION,
    Adapter,
    Count,
    ExactnessFlags,
    HealthCheck,
    Interview,
    LoadReader,
    Profile,
    Rank,
    RankLoad,
    Ranks,
    Size,
    StreamForm,
    UnrecognizedError,
    decoded,
    share,
)
from router.engines.rendering import SglangRender
from router.engines.version import version_in
from router.events.sources import RankedSources, server_info_sources

Short = Annotated[str, Meta(max_length=128)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
_BOOTSTRAP_PORT = 8_998
_MARKS = frozenset({"page_size", "max_total_num_tokens", "internal_states"})
_INFO = ("/server_info", "/get_server_info")  # the second to 0.5.9
_GAUGES = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_used_tokens": "used",
    "sglang:token_usage": "usage",
}
_MODEL_INFO = "/model_info"
# Models with layers that keep states, by `model_type` (0.5.23, `configs/hybrid_arch.py`), and with
# windows, for releases that do not say it themselves (`configs/model_config.py`).
_STATE_MODELS = frozenset(
    {
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "intern_s2_preview", "jet_nemotron", "jet_vlm"),
        *("falcon_h1", "nemotron_h", "nemotron_h_puzzle", "lfm2", "lfm2_moe", "lfm2_vl", "zaya"),
        *("mamba", "mamba2", "falcon_mamba", "granitemoehybrid", "kimi_linear", "bailing_hybrid"),
    }
)
_WINDOW_MODELS = frozenset({"gpt_oss", "llama4", "gemma4"})
_HEALTH = HealthCheck(least_s=5.0)  # it waits for its scheduler to do something, a second or more
_ONE_TOKEN = "its blocks have 1 token, which costs memory and time: give it --page-size 16 or more"


class _MemoryUsage(msgspec.Struct):
    # Of the layers with a sliding window; None: they keep all. Older releases do not say.
    token_capacity_swa: Count | msgspec.UnsetType | None = msgspec.UNSET


class _InternalState(msgspec.Struct):
    memory_usage: _MemoryUsage | None = None


class _InternalStates(msgspec.Struct):
    internal_states: Annotated[list[_InternalState], Meta(max_length=4_096)] = []


class _ModelInfo(msgspec.Struct):
    model_type: Short | None = None


class _SglangInfo(msgspec.Struct):
    page_size: Size | None = None
    dp_size: Ranks | None = None
    max_total_num_tokens: Count | None = None
    version: Short = ""
    kv_cache_dtype: Short | None = None
    load_balance_method: Short | None = None
    disaggregation_mode: Literal["null", "prefill", "decode"] | None = None
    disaggregation_bootstrap_port: Port | None = None
    disaggregation_transfer_backend: Short | None = None
    disaggregation_decode_enable_radix_cache: bool | None = None
    disable_radix_cache: bool = False


class _Load(msgspec.Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count
    dp_rank: Rank | None = None
    num_used_tokens: Count | None = None
    token_usage: float | None = None


class _Answer(msgspec.Struct):
    loads: Annotated[list[_Load], Meta(max_length=4_096)]


class _OldLoad(msgspec.Struct):
    num_reqs: Count  # includes the waiting requests
    num_waiting_reqs: Count = 0
    num_tokens: Count | None = None  # in use, and those of the prompts that wait
    dp_rank: Rank | None = None


_OldAnswer: Any = Annotated[list[_OldLoad], Meta(max_length=4_096)] | _OldLoad


def v1_loads_in(text: str) -> Mapping[int, RankLoad]:
    """Return the load of each rank in the answer to `GET /v1/loads`. Raises WireError for a
    malformed answer.
    """
    return {
        load.dp_rank or 0: RankLoad(
            running=load.num_running_reqs,
            waiting=load.num_waiting_reqs,
            kv_used_tokens=_or_nan(load.num_used_tokens),
            kv_usage=share(load.token_usage, "token_usage"),
        )
        for load in decoded(text, _Answer, "/v1/loads").loads
    }


def old_loads_in(text: str) -> Mapping[int, RankLoad]:
    """Return the load of each rank in the answer to `GET /get_load`, which is a list, or one object
    (0.4.8). Raises WireError for a malformed answer.
    """
    answer: list[_OldLoad] | _OldLoad = decoded(text, _OldAnswer, "/get_load")
    loads = answer if isinstance(answer, list) else [answer]
    return {
        load.dp_rank or 0: RankLoad(
            running=max(load.num_reqs - load.num_waiting_reqs, 0),
            waiting=load.num_waiting_reqs,
            kv_used_tokens=math.nan if load.num_waiting_reqs else _or_nan(load.num_tokens),
        )
        for load in loads
    }


def loads_in(text: str) -> dict[int, RankLoad]:
    """Return the load of each rank in the gauges whose names begin with `sglang:`. Of each
    data-parallel rank, only the gauges of its first tensor-parallel rank count. Raises WireError if
    there is no such gauge.
    """
    by_rank: dict[int, dict[str, float]] = {}
    for sample in samples(text, _GAUGES):
        values = by_rank.setdefault(label_rank(sample, "dp_rank") or 0, {})
        values.setdefault(_GAUGES[sample.name], sample.value)
    if not by_rank or any(not {"running", "waiting"} <= v.keys() for v in by_rank.values()):
        raise WireError("metrics without sglang:num_running_reqs and sglang:num_queue_reqs")
    return {
        rank: RankLoad(
            running=int(values["running"]),
            waiting=int(values["waiting"]),
            kv_used_tokens=_or_nan(values.get("used")),
            kv_usage=share(values.get("usage"), "sglang:token_usage"),
        )
        for rank, values in by_rank.items()
    }


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    told = NO_VERSION
    for path in _INFO:
        if _MARKS & await talk.keys(path):
            body = (await talk.get(path)).body
            info, sources = decoded(body, _SglangInfo, path), server_info_sources(body, talk.host)
            told = version_in(body, path)
            break
    else:
        if not named:
            return None
        info, sources = _SglangInfo(), RankedSources({})
    ranks = max(info.dp_size or 1, sources.ranks)
    size = sources.block_size or info.page_size
    tokens = info.max_total_num_tokens
    role = _role(talk, info)
    return Profile(
        role=role,
        transfers=role != "both",
        version=_transfer_properties(info, size),
        reported_version=told,
        keeps_prefixes=role != "decode" or bool(info.disaggregation_decode_enable_radix_cache),
        bootstrap=_bootstrap(talk, info, ranks) if role != "both" else None,
        block_size=size,
        usual_block_size=1,
        kv_tokens=dict.fromkeys(range(ranks), tokens) if tokens else {},
        ranks=tuple(range(ranks)),
        sources=sources.by_rank,
        loads=await _reader(talk),
        health=_HEALTH,
        advice=_ONE_TOKEN if size in (None, 1) and talk.spec.block_size is None else "",
        caches_prefixes=not info.disable_radix_cache,
        leaves_out_groups=bool(sources.by_rank or talk.spec.events) and await _is_hybrid(talk),
    )


async def _is_hybrid(talk: Interview) -> bool:
    """Return whether some layers of the model have a sliding window or a state. KV events do not
    report these.
    """
    model, has_windows = None, None
    for path in _INFO:
        with suppress(WireError):
            status, body = await talk.get(path)
            if status == 200:
                has_windows = _has_windows(decoded(body, _InternalStates, path))
                break
    with suppress(WireError):
        status, body = await talk.get(_MODEL_INFO)
        if status == 200:
            model = decoded(body, _ModelInfo, _MODEL_INFO).model_type
    if has_windows is None:
        has_windows = model in _WINDOW_MODELS
    return has_windows or model in _STATE_MODELS


def _has_windows(info: _InternalStates) -> bool | None:
    """Return whether the server has a separate pool of memory for layers with windows. Return None
    if the server does not say.
    """
    usages = [state.memory_usage for state in info.internal_states if state.memory_usage]
    told = [u.token_capacity_swa for u in usages if u.token_capacity_swa is not msgspec.UNSET]
    return any(tokens is not None for tokens in told) if told else None


def _role(talk: Interview, info: _SglangInfo) -> Role:
    """Return the role that the server reports, or else the role that the operator set. Raises
    UnrecognizedError if both are known and differ.
    """
    given, mode = talk.spec.role, info.disaggregation_mode
    if mode is None or mode == given:
        return given
    told: Role = "both" if mode == "null" else mode
    if given not in ("both", told):
        raise UnrecognizedError(
            f"role={given} was given, but it was started with --disaggregation-mode {mode}"
        )
    return told


def _transfer_properties(info: _SglangInfo, page_size: int | None) -> str:
    """Return the properties that two workers must share for KV transfers between them."""
    backend = info.disaggregation_transfer_backend or "mooncake"
    parts = (info.version, backend, f"page {page_size}", info.kv_cache_dtype or "")
    return " ".join(filter(None, parts))


def _bootstrap(talk: Interview, info: _SglangInfo, ranks: int) -> BootstrapAddress:
    """Return the address of a prefill worker's bootstrap server. With the load-balancing method
    `auto`, the number of the room decides which rank prefills.
    """
    port = talk.spec.bootstrap_port or info.disaggregation_bootstrap_port or _BOOTSTRAP_PORT
    by_room = info.load_balance_method in (None, "auto", "follow_bootstrap_room")
    return BootstrapAddress(talk.host, port, ranks, talk.spec.rank, by_room)


async def _reader(talk: Interview) -> LoadReader | None:
    """Return a reader for the newest load format that the server offers, or None if it
    offers none.
    """
    base = talk.spec.url
    if talk.spec.metrics is None:
        if "loads" in await talk.keys("/v1/loads"):
            return LoadReader(f"{base}/v1/loads", v1_loads_in)
        status, body = await talk.get("/get_load")
        if status == 200 and body[:1] in (b"[", b"{"):
            return LoadReader(f"{base}/get_load", old_loads_in)
    try:
        loads_in(await talk.metrics())
    except WireError:
        return None
    return LoadReader(talk.metrics_url, loads_in)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


ADAPTER = Adapter(
    "sglang",
    _recognize,
    # By the HTTP server of SGLang 0.5.23.
    lacks=KSERVE_PATHS | {"/pooling", "/score", "/rerank", "/v2/rerank", "/inference/v1/generate"},
    takes_prompt_ids=True,
    stream_form=StreamForm(chat=False),  # pull request 30917 refuses the field for streamed chats
    transfer=Rooms(),
    render=SglangRender(),
    role_switch="/pd_role_switch",  # 0.5.23, `role_switch.py`
    flags=ExactnessFlags(
        caching="the engine without --disable-radix-cache",
        events='--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
        '"replay_endpoint":"tcp://*:5657"}\'',
        replay='"replay_endpoint":"tcp://*:5657" in the engine\'s --kv-events-config',
        buffer='a larger "buffer_steps" in the engine\'s --kv-events-config',
    ),
)
