"""The pages on which TensorRT-LLM's servers describe themselves, for tests."""

from __future__ import annotations

from tests.router.engines.engine_pages import Pages

MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]}
METRICS = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 3.0
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 1.0
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.25
trtllm_kv_cache_max_blocks{model_name="m",engine_type="trtllm"} 1000.0
trtllm_kv_cache_used_blocks{model_name="m",engine_type="trtllm"} 250.0
trtllm_kv_cache_tokens_per_block{model_name="m",engine_type="trtllm"} 64.0
"""
OLD: Pages = {"/v1/models": MODELS, "/metrics": [], "POST /kv_cache_events": []}
NEW: Pages = {
    **OLD,
    "/server_info": {"disaggregated_params": None, "tokens_per_block": 64, "max_batch_size": 8},
    "/prometheus/metrics": METRICS,
}


def iteration(active: int, queued: int, **others: object) -> dict[str, object]:
    return {
        "iter": 7,
        "numActiveRequests": active,
        "numQueuedRequests": queued,
        "kvCacheStats": {"maxNumBlocks": 1000, "usedNumBlocks": 100, "tokensPerBlock": 32},
        "inflightBatchingStats": {"numScheduledRequests": active, "numCtxTokens": 5},
        **others,
    }
