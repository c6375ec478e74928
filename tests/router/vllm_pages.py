"""The pages on which vLLM's servers describe themselves, for tests."""

from __future__ import annotations

from tests.router.engines.engine_pages import (
    MODELS,
    Pages,
)

METRICS = """\
# HELP vllm:num_requests_running Running.
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="1000",engine="0"} 1.0
"""
SOURCES = {
    "0": {
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://0.0.0.0:5558",
        "topic": "kv",
        "buffer_steps": 10_000,
    }
}
VLLM: Pages = {"/v1/models": MODELS, "/metrics": METRICS}
