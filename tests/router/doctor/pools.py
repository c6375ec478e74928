"""Readings of fake pools, in the bytes that servers send, which are parsed as real ones are.

A model's figures are those of the observed time; before it there were slow warm-up requests, which
must not be counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.doctor.evidence import ClientFacts, Evidence, RouterEvidence, evidence_of
from router.doctor.readings import (
    ExaminedServer,
    Reading,
    TritonModelConfig,
    Watched,
    parse_gauges,
    parse_json,
    parse_stats,
)

SECONDS = 10.0
LOOKS = 4  # after the first
WARM_UP_MS = 270.0
URL = "http://gpu1:8000"
URLS = tuple(f"http://gpu{n}:8000" for n in range(1, 9))


def config(name: str = "m", **fields: Any) -> dict[str, Any]:
    """Return a model's configuration in the form of `/config`: a Python model with batches of 8 and
    the dynamic batcher on.
    """
    plain: dict[str, Any] = {
        "name": name,
        "platform": "",
        "backend": "python",
        "max_batch_size": 8,
        "input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [4]}],
        "instance_group": [{"name": f"{name}_0", "kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0},
        "model_transaction_policy": {"decoupled": False},
        "parameters": {},
    }
    made = plain | fields
    return {key: value for key, value in made.items() if value is not None}


def instances(count: int, **more: Any) -> list[dict[str, Any]]:
    """Return the configuration field `instance_group` for `count` instances."""
    return [{"name": "m_0", "kind": "KIND_CPU", "count": count, **more}]


def parameters(**values: str) -> dict[str, Any]:
    """Return the configuration field `parameters` with these values."""
    return {name: {"string_value": value} for name, value in values.items()}


def ran(
    name: str = "m",
    sizes: Mapping[int, tuple[int, float]] | None = None,
    queue_ms: float = 0.0,
    requests: int | None = None,
    failed: int = 0,
    cache_hits: int = 0,
) -> dict[str, Any]:
    """Return a model's figures of the observed time: `sizes` are executions and ms by
    batch size.
    """
    sizes = {} if sizes is None else sizes
    rows = sum(batch * count for batch, (count, _) in sizes.items())
    return {
        "name": name,
        "sizes": sizes,
        "rows": rows,
        "executions": sum(count for count, _ in sizes.values()),
        "requests": rows + cache_hits if requests is None else requests,
        "queue_ms": queue_ms,
        "failed": failed,
        "cache_hits": cache_hits,
    }


def _stats(figures: dict[str, Any], watched: bool) -> dict[str, Any]:
    """Return the figures in the form of `/v2/models/stats`, before the observed time or
    after it.
    """
    on = 1 if watched else 0

    def sums(count: int, ms: float) -> dict[str, int]:
        return {"count": count, "ns": round(count * ms * 1e6)}

    def plus(count: int, ms: float) -> dict[str, int]:
        warm, more = sums(2, WARM_UP_MS), sums(on * count, ms)
        return {key: warm[key] + more[key] for key in warm}

    requests, hits = figures["requests"], figures["cache_hits"]
    computed = requests - hits  # an answer from the cache takes next to nothing
    sizes = {1: (0, 0.0)} | figures["sizes"]
    rows = figures["rows"]
    compute_ms = sum(b * c * ms for b, (c, ms) in sizes.items()) / max(rows, 1)
    each_ms = (figures["queue_ms"] + compute_ms) * computed / max(requests, 1)
    return {
        "name": figures["name"],
        "version": "1",
        "last_inference": 1,
        "inference_count": 2 + on * rows,
        "execution_count": 2 + on * figures["executions"],
        "inference_stats": {
            "success": plus(requests, each_ms),
            "fail": sums(on * figures["failed"], 1.0),
            "queue": plus(requests, figures["queue_ms"] * computed / max(requests, 1)),
            "compute_input": plus(computed, 0.0),
            "compute_infer": plus(computed, compute_ms),
            "compute_output": plus(computed, 0.0),
            "cache_hit": sums(on * hits, 0.1),
        },
        "batch_stats": [
            {
                "batch_size": batch,
                "compute_input": sums(0, 0.0),
                "compute_infer": plus(count, ms) if batch == 1 else sums(on * count, ms),
                "compute_output": sums(0, 0.0),
            }
            for batch, (count, ms) in sizes.items()
        ],
    }


def trt(model: str = "tensorrt_llm", still: bool = False, **gauges: Any) -> list[str]:
    """Return pages with the TensorRT-LLM backend's gauges, one for each time that the doctor reads
    them.

    A list of values gives one value for each reading. Names are those in `_TRT`; with `still` the
    engine makes no step.
    """
    pages = []
    for look in range(LOOKS + 1):
        lines = []
        steps = {"iteration": 5 if still else 5 + 7 * look}
        for name, given in (steps | gauges).items():
            family, label, kind = _TRT[name]
            value = given[look] if isinstance(given, list) else given
            told = f'model="{model}",version="1"' + (f',{label}="{kind}"' if label else "")
            lines.append(f"{family}{{{told}}} {value}")
        pages.append("\n".join(lines) + "\n")
    return pages


_REQUESTS, _KV = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_BATCHER, _OF = "nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"
_TRT = {
    "iteration": ("nv_trt_llm_general_metrics", "general_type", "iteration_counter"),
    **{k: (_REQUESTS, "request_type", k) for k in ("active", "scheduled", "context", "max")},
    "kv_max": (_KV, "kv_cache_block_type", "max"),
    "kv_used": (_KV, "kv_cache_block_type", "used"),
    "tokens_per": (_KV, "kv_cache_block_type", "tokens_per"),
    "reused": (_KV, "kv_cache_block_type", "reused"),
    "paused": (_BATCHER, _OF, "paused_requests"),
    "generation": (_BATCHER, _OF, "generation_requests"),
    "context_tokens": (_BATCHER, _OF, "total_context_tokens"),
    "static": ("nv_trt_llm_v1_metrics", "v1_specific_metric", "num_ctx_tokens"),
    "input_sum": ("nv_llm_input_token_len_sum", "", ""),
    "input_count": ("nv_llm_input_token_len_count", "", ""),
    "output_sum": ("nv_llm_output_token_len_sum", "", ""),
    "output_count": ("nv_llm_output_token_len_count", "", ""),
}


def lengths(prompt: int, output: int) -> dict[str, Any]:
    """Return gauges of token lengths that have other values before and within the observed time."""
    counts = [10 * look for look in range(1, LOOKS + 2)]
    return {
        "input_sum": [10 * 5 + prompt * (count - 10) for count in counts],
        "input_count": counts,
        "output_sum": [10 * 5 + output * (count - 10) for count in counts],
        "output_count": counts,
    }


def triton(
    configs: list[dict[str, Any]],
    *figures: dict[str, Any],
    gauges: list[str] | str = "",
    url: str = URL,
    version: str = "2.51.0",
) -> Watched:
    """Return the readings of a Triton over an observed time."""
    known = {
        c["name"]: parse_json(json.dumps(c).encode(), TritonModelConfig, "config") for c in configs
    }
    readings = []
    for look in range(LOOKS + 1):
        page = gauges if isinstance(gauges, str) else gauges[look]
        body = json.dumps({"model_stats": [_stats(one, look > 0) for one in figures]}).encode()
        at_s = 1000.0 + SECONDS * look / LOOKS
        readings.append(Reading(at_s, parse_gauges(page), parse_stats(body, "stats")))
    return Watched(
        ExaminedServer(url, "triton", version, known, models=tuple(known)), tuple(readings)
    )


def plain(
    kind: str, pages: list[str] | str, url: str = "http://gpu1:8001", **settings: str
) -> Watched:
    """Return the readings of an engine other than Triton over an observed time."""
    each = [pages] * (LOOKS + 1) if isinstance(pages, str) else pages
    readings = tuple(
        Reading(1000.0 + SECONDS * look / LOOKS, parse_gauges(page))
        for look, page in enumerate(each)
    )
    return Watched(ExaminedServer(url, kind, settings=settings, models=("llm",)), readings)


def pool(*watched: Watched, **facts: Any) -> Evidence:
    """Return the evidence that the doctor has of these servers."""
    return Evidence(tuple(evidence_of(one) for one in watched), ClientFacts(**facts))


def router(in_flight: float = 0.0, connections: float = 0.0, **more: Any) -> RouterEvidence:
    """Return the counts that the doctor reads from our router."""
    return RouterEvidence(connections, in_flight, more.pop("most", in_flight), **more)
