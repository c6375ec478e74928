"""The pages on which Triton's servers describe themselves, for tests."""

from __future__ import annotations

from tests.router.engines.engine_pages import MODELS, Pages

CORE = """\
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 12
nv_inference_pending_request_count{model="ensemble",version="1"} 0
"""
_OF = 'model="tensorrt_llm",version="1"'
BACKEND = f"""\
{CORE}nv_trt_llm_request_metrics{{{_OF},request_type="active"}} 5
nv_trt_llm_request_metrics{{{_OF},request_type="scheduled"}} 3
nv_trt_llm_request_metrics{{{_OF},request_type="context"}} 1
nv_trt_llm_request_metrics{{{_OF},request_type="max"}} 512
nv_trt_llm_kv_cache_block_metrics{{{_OF},kv_cache_block_type="max"}} 1000
nv_trt_llm_kv_cache_block_metrics{{{_OF},kv_cache_block_type="used"}} 100
nv_trt_llm_kv_cache_block_metrics{{{_OF},kv_cache_block_type="tokens_per"}} 64
"""
NEWER = f"""\
{BACKEND}nv_trt_llm_request_metrics{{{_OF},request_type="waiting"}} 4
nv_trt_llm_kv_cache_block_metrics{{{_OF},kv_cache_block_type="fraction"}} 0.1
"""
# Before its first request: gauges are 0.
FRESH_BACKEND = "".join(
    f"{line.rpartition(' ')[0]} 0\n" if "_block_metrics" in line else f"{line}\n"
    for line in BACKEND.splitlines()
)
TRITON: Pages = {"/v1/models": MODELS, "/metrics": BACKEND, "/health/ready": "ok"}
