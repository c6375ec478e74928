"""Triton with the TensorRT-LLM backend, behind its OpenAI frontend."""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.wire.events import WireError
from engine.wire.metrics import samples
from router.fleet.engines.adapter import (
    Adapter,
    HealthCheck,
    Interview,
    LoadReader,
    Profile,
    RankLoad,
    UnrecognizedError,
    share,
    total,
)

_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_TYPES = {_REQUESTS: "request_type", _BLOCKS: "kv_cache_block_type"}  # label that says what
_READY = ("/v2/health/ready", "/health/ready")  # Triton's own port, its OpenAI frontend
_ABSENT = (404, 405, 501)
_BLOCK_SIZE = 32  # tokens, its default

Figures = dict[tuple[str, str], float]  # (series, type) -> value


def loads_in(text: str) -> Mapping[int, RankLoad]:
    """The load in `nv_trt_llm_...` gauges; models of one server are added up. Raises WireError."""
    return {0: total([_load_of(figures) for figures in figures_in(text)])}


def figures_in(text: str) -> list[Figures]:
    """The figures of each model that has a batch. Raises WireError where there is none."""
    models: dict[tuple[str | None, str | None], Figures] = {}
    for sample in samples(text, _TYPES):
        model = sample.labels.get("model"), sample.labels.get("version")
        kind = sample.labels.get(_TYPES[sample.name], "")
        models.setdefault(model, {})[sample.name, kind] = sample.value
    found = [figures for figures in models.values() if (_REQUESTS, "scheduled") in figures]
    if not found:
        raise WireError(f"metrics without {_REQUESTS}")
    return found


def _load_of(figures: Figures) -> RankLoad:
    running = figures[_REQUESTS, "scheduled"]
    active = figures.get((_REQUESTS, "active"), running)
    used = figures.get((_BLOCKS, "used"), math.nan)
    return RankLoad(
        running=int(running),
        waiting=int(figures.get((_REQUESTS, "waiting"), max(active - running, 0.0))),
        kv_used_tokens=used * figures.get((_BLOCKS, "tokens_per"), math.nan),
        kv_usage=share(figures.get((_BLOCKS, "fraction")), "the KV cache's fraction"),
        block_size=int(figures.get((_BLOCKS, "tokens_per"), 0)),
    )


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    text = await talk.metrics()
    if not named and "\nnv_inference_" not in text and "\nnv_trt_llm_" not in f"\n{text}":
        return None
    try:
        models = figures_in(text)
    except WireError:
        models = []
    sizes = [int(figures.get((_BLOCKS, "tokens_per"), 0)) for figures in models]
    blocks = [int(figures.get((_BLOCKS, "max"), 0)) for figures in models]
    capacity = sum(map(int.__mul__, sizes, blocks))
    return Profile(
        block_size=next(filter(None, sizes), None),
        usual_block_size=_BLOCK_SIZE,
        kv_tokens={0: capacity} if capacity else {},
        loads=LoadReader(talk.metrics_url, loads_in) if models else None,
        health=await _health(talk),
        advice="" if models else "no load figures: give metrics=http://HOST:8002/metrics",
    )


async def _health(talk: Interview) -> HealthCheck:
    """Where it says whether it is ready. Raises UnrecognizedError where it says that it is not."""
    for path in _READY:
        status = (await talk.get(path)).status
        if status not in _ABSENT:
            health = HealthCheck(path, below=300)  # it answers 400 while it is not ready
            if status >= health.below:
                raise UnrecognizedError(f"it is not ready: GET {path} answered {status}")
            return health
    return HealthCheck()


ADAPTER = Adapter("triton", _recognize)
