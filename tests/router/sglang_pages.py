"""The pages on which SGLang's servers describe themselves, for tests."""

from __future__ import annotations

from tests.router.engines.engine_pages import MODELS, Pages

INFO = {
    "version": "0.5.23",
    "page_size": 16,
    "dp_size": 1,
    "tp_size": 2,
    "max_total_num_tokens": 400_000,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
    "kv_events": None,
}
EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 32,
    "dp_size": 2,
    "replay_endpoint_port_base": 5657,
    "load_endpoint_port_base": None,
}
LOADS = {
    "timestamp": "2026-08-20T10:00:00Z",
    "version": "0.5.23",
    "loads": [
        {
            "dp_rank": rank,
            "num_running_reqs": 3 + rank,
            "num_waiting_reqs": 2,
            "num_waiting_uncached_tokens": 900,
            "num_used_tokens": 120_000,
            "max_total_num_tokens": 400_000,
            "token_usage": 0.3,
        }
        for rank in (0, 1)
    ],
}
METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="1"} 0.0
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="0"} 0.3
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="1"} 0.6
sglang:num_used_tokens{model_name="m",tp_rank="0",dp_rank="1"} 240000
"""
SGLANG: Pages = {"/v1/models": MODELS, "/server_info": INFO, "/v1/loads": LOADS}
