"""Queries for metrics that all kinds of engines have, each kind under its own names.

warmroute-engine uses vLLM's names. SGLang, TensorRT-LLM and Triton have other names; Triton's
metrics of a batch come from its TensorRT-LLM backend. An engine has one set of names, so a query
for all names counts no engine twice.
"""

from __future__ import annotations

from grafana.drawing import selected

Names = tuple[str, ...]  # metrics; a name may have matchers in braces

RUNNING = (
    *("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"),
    'nv_trt_llm_request_metrics{request_type="scheduled"}',
)
WAITING = (
    *("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"),
    *("nv_inference_pending_request_count", 'nv_trt_llm_request_metrics{request_type="waiting"}'),
)
KV_USAGE = (
    *("vllm:kv_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization"),
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',
)
HIT_TOKENS = (
    *("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "trtllm_prompt_cached_tokens_total",
)
LOOKED_UP_TOKENS = (
    *("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "trtllm_prompt_tokens_total",
)
PROMPT_TOKENS = (
    *("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "trtllm_prompt_tokens_total"),
)
ANSWER_TOKENS = (
    *("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "trtllm_generation_tokens_total",
)
ANSWERS = (
    *("vllm:request_success_total", "sglang:num_requests_total", "trtllm_request_success_total"),
    "nv_inference_request_success",
)
REFUSED = ("vllm:admission_rejections_total", "warmroute_engine_refused_total")
FAILED = (
    *('vllm:request_success_total{finished_reason="error"}', "trtllm_request_error_total"),
    *("sglang:num_aborted_requests_total", "nv_inference_request_failure"),
)
PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
FIRST_TOKEN = (
    *("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "trtllm_time_to_first_token_seconds",
)
BETWEEN_TOKENS = (
    *("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "trtllm_time_per_output_token_seconds",
)
WHOLE = (
    *("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "trtllm_e2e_request_latency_seconds",
)


def gauges(names: Names, of: str) -> str:
    """Return a query for the series with any of the names, of the engines that `of` selects."""
    return " or ".join(_selected(name, of) for name in names)


def rates(names: Names, of: str, by: str = "") -> str:
    """Return a query for the increase per second of the counters, summed by the labels `by`."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}({_rates(names, of)})"


def ratio(part: Names, whole: Names, of: str, by: str = "") -> str:
    """Return a query for the rate of one counter divided by the rate of another counter."""
    return f"{rates(part, of, by)} / {rates(whole, of, by)}"


def quantile_of_each(q: float, names: Names, of: str) -> str:
    """Return a query for a quantile of each engine's histogram.

    Engines are not summed, because the bounds of buckets differ between kinds of engines.
    """
    buckets = rates(tuple(f"{name}_bucket" for name in names), of, "le, instance")
    return f"histogram_quantile({q}, {buckets})"


def worst_quantiles(names: Names, of: str) -> tuple[tuple[str, str], ...]:
    """Return queries and legends for median, p90 and p99, each at the slowest engine."""
    return tuple(
        (f"max({quantile_of_each(q, names, of)})", name)
        for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def _rates(names: Names, of: str) -> str:
    return " or ".join(f"rate({_selected(name, of)}[$__rate_interval])" for name in names)


def _selected(name: str, of: str) -> str:
    metric, _, matchers = name.rstrip("}").partition("{")
    return selected(metric, matchers, of)
