"""Each of the doctor's 39 causes as a pool that has it, and as the same pool without it.

A case is the cause's number, the text that its first finding must have, the field to change, and
the two pools.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from router.doctor.evidence import Evidence
from tests.router.doctor.pools import (
    LOOKS,
    URL,
    URLS,
    config,
    instances,
    lengths,
    parameters,
    plain,
    pool,
    ran,
    router,
    triton,
    trt,
)


class Case(NamedTuple):
    """One cause, a pool that has it, and the same pool without it."""

    number: int
    says: tuple[str, ...]  # parts of its evidence
    change: str | None  # beginning of the field to change; None: nothing
    sick: Evidence
    well: Evidence


ALONE = ran(sizes={1: (450, 20.0)}, queue_ms=140.0)  # 8 clients, one after another
TOGETHER = ran(sizes={8: (400, 22.0)}, queue_ms=11.0)
QUIET = ran(sizes={4: (200, 21.0)}, queue_ms=8.0)
DELAY = {"preferred_batch_size": [8], "max_queue_delay_microseconds": 100_000}
FREE = [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1]}]
OPTIONAL = [
    {"name": "INPUT", "data_type": "TYPE_FP32", "dims": [4]},
    {"name": "MORE", "data_type": "TYPE_FP32", "dims": [4], "optional": True},
]
RAGGED = [FREE[0] | {"allow_ragged_batch": True}]
LLM: dict[str, Any] = {
    "name": "tensorrt_llm",
    "backend": "tensorrtllm",
    "model_transaction_policy": {"decoupled": True},
}
HEALTHY: dict[str, Any] = {
    "active": 8,
    "scheduled": 8,
    "max": 64,
    "kv_max": 1000,
    "kv_used": 300,
    "tokens_per": 64,
}


def single_model(
    configured: dict[str, Any], figures: dict[str, Any], gauges: Any = "", **facts: Any
) -> Evidence:
    """Return the doctor's evidence of a Triton with one model."""
    return pool(triton([configured], figures, gauges=gauges), **facts)


def llm(gauges: dict[str, Any], params: dict[str, str] | None = None, **facts: Any) -> Evidence:
    """Return the evidence of a Triton with the TensorRT-LLM backend, whose statistics show batch
    size 1 for every request.
    """
    fields = facts.pop("fields", {})
    made = config(**(LLM | {"parameters": parameters(**(params or {}))} | fields))
    figures = ran("tensorrt_llm", {1: (40, 0.2)})
    return single_model(made, figures, trt(**(HEALTHY | gauges)), **facts)


def failures(count: int) -> list[str]:
    """Return a metrics page with the counter of requests that waited too long."""
    name = 'nv_inference_request_failure{model="m",version="1",reason="REJECTED"}'
    return [f"{name} {3 + (count if look else 0)}\n" for look in range(LOOKS + 1)]


def queue(**policy: Any) -> dict[str, Any]:
    """Return a model configuration with this queue policy."""
    return config(dynamic_batching={"default_queue_policy": policy})


# 1 to 12.
SLOW = "requests wait 140 ms for executions of 20 ms"
SEQUENCES = {"direct": {}, "max_sequence_idle_microseconds": 5_000_000}
HELD = config(dynamic_batching=None, sequence_batching=SEQUENCES)
PENDING = 'nv_inference_pending_request_count{model="m",version="1"} 6\n'
LIMITER = {"resources": [{"name": "R", "global": True, "count": 4}], "priority": 0}
LIMITED = config(instance_group=instances(4, rate_limiter=LIMITER))
LONE = ran(sizes={1: (50, 20.0)}, queue_ms=100.0)
SPREAD = ran(sizes={1: (700, 20.0), 2: (50, 21.0)}, queue_ms=10.0)
SCHEDULER = (
    Case(
        1,
        (SLOW, "mean batch 1 of 8"),
        "dynamic_batching",
        single_model(config(dynamic_batching=None), ALONE),
        single_model(config(), TOGETHER),
    ),
    Case(
        2,
        ("max_batch_size is 0", "140 ms"),
        "max_batch_size",
        single_model(config(max_batch_size=0), ALONE),
        single_model(config(), TOGETHER),
    ),
    Case(
        3,
        (SLOW, "INPUT may have any length"),
        "input INPUT: allow_ragged",
        single_model(config(input=FREE), ALONE),
        single_model(config(input=RAGGED), TOGETHER),
    ),
    Case(
        4,
        (SLOW, "MORE are optional"),
        "inputs of requests",
        single_model(config(input=OPTIONAL), ALONE),
        single_model(config(input=OPTIONAL), TOGETHER),
    ),
    Case(
        5,
        ("4 instances", "93.3 % of executions"),
        "instance_group.count",
        single_model(config(instance_group=instances(4)), SPREAD),
        single_model(config(), TOGETHER),
    ),
    Case(
        6,
        ("take 120 ms", "100 ms of it is the delay of 100 ms"),
        "dynamic_batching.max_queue",
        single_model(config(dynamic_batching=DELAY), LONE),
        single_model(config(), QUIET),
    ),
    Case(
        7,
        ("5 requests a second of 20 ms", "0.1 in flight", "10 % busy"),
        None,
        single_model(config(), ran(sizes={1: (50, 20.0)})),
        single_model(config(), QUIET),
    ),
    Case(
        8,
        ("max_queue_size is 2", "17 requests were refused"),
        "dynamic_batching.default_queue_policy.max_queue_size",
        single_model(queue(max_queue_size=2), TOGETHER, router=router(8, 8, refused={URL: 17.0})),
        single_model(queue(max_queue_size=2), TOGETHER, router=router(8, 8, refused={URL: 0.0})),
    ),
    Case(
        9,
        ("12 requests were rejected", "timeout 50 ms", "mean wait 11 ms"),
        "dynamic_batching.default_queue_policy.default_timeout",
        single_model(queue(default_timeout_microseconds=50_000), TOGETHER, failures(12)),
        single_model(queue(default_timeout_microseconds=50_000), TOGETHER, failures(0)),
    ),
    Case(
        10,
        ("R x 4", "22.5 % busy"),
        "instance_group.rate_limiter",
        single_model(LIMITED, ran(sizes={1: (450, 20.0)}, queue_ms=140.0)),
        single_model(LIMITED, TOGETHER),
    ),
    Case(
        11,
        ("6 wait on average", "8 slots", "idle for 5,000 ms"),
        "sequences of clients",
        single_model(HELD, ran(sizes={1: (40, 20.0)}, queue_ms=900.0), PENDING),
        single_model(HELD, QUIET),
    ),
    Case(
        12,
        ("90 of 100 requests were answered by the response cache",),
        None,
        single_model(config(), ran(sizes={2: (5, 20.0)}, cache_hits=90)),
        single_model(config(), QUIET),
    ),
)


# 13 to 25.
TIGHT = {"active": 8, "scheduled": 1, "kv_max": 40, "kv_used": 33, **lengths(1000, 1060)}
OLD = {"max_tokens_in_paged_kv_cache": "2560"}
CROWD = {"active": 20, "scheduled": 5, "kv_max": 160, "kv_used": 152, **lengths(1000, 1000)}
WAITS = {"active": 20, "scheduled": 4, "kv_used": 100}
MOST = {"batch_scheduler_policy": "max_utilization"}
SMALL = {"active": 20, "scheduled": 4, "max": 4, "kv_used": 100}
PAUSES = {"active": 20, "scheduled": [12, 3, 14, 4, 11], "kv_used": 990, "paused": 5}
PROMPTS = {**WAITS, "context_tokens": 8000, "context": 4}
REPEATS = router(8, 8, hit_share=0.6)
LONG = {"context": 1, "generation": 7, **lengths(6000, 100)}
TEXTS = {"batch_dimension": 9}
ENGINES = (
    Case(
        13,
        ("8 active, 1 scheduled of at most 64", "holds 2,560 tokens", "needs 2,060"),
        "parameters.max_tokens_in_paged_kv_cache",
        llm(TIGHT, OLD),
        llm(TIGHT | {"scheduled": 8, "kv_max": 1000, "kv_used": 264}),
    ),
    Case(
        14,
        ("20 active, 4 scheduled", "10 % of the KV cache in use", "guaranteed_no_evict"),
        "max_tokens of requests",
        llm(WAITS),
        llm(WAITS | {"scheduled": 20}),
    ),
    Case(
        15,
        ("5 requests paused", "99 % full"),
        "parameters.batch_scheduler_policy",
        llm(PAUSES, MOST),
        llm(PAUSES | {"paused": 0, "scheduled": 20}, MOST),
    ),
    Case(
        16,
        ("4 scheduled all the time of at most 4", "16 wait", "90 % of the KV cache is free"),
        "max_batch_size",
        llm(SMALL),
        llm(SMALL | {"scheduled": 20, "max": 64}),
    ),
    Case(
        17,
        ("steps prefill 8,000 of 8,192 tokens",),
        "max_num_tokens",
        llm(PROMPTS, max_num_tokens=8192.0),
        llm(PROMPTS | {"scheduled": 20}, max_num_tokens=8192.0),
    ),
    Case(
        18,
        ("nv_trt_llm_v1_metrics",),
        "parameters.gpt_model_type",
        llm({"static": 5}, {"gpt_model_type": "V1"}),
        llm({}, {"gpt_model_type": "inflight_fused_batching"}),
    ),
    Case(
        19,
        ("1 parameters have no effect",),
        "tensorrt_llm: parameters.batch_scheduler_policy",
        llm({}, {"batch_scheduler_policy": "static_batch"}),
        llm({}, MOST),
    ),
    Case(
        20,
        ("0 blocks",),
        "paged KV cache",
        llm({"active": 8, "scheduled": 1, "kv_max": 0, "kv_used": 0}),
        llm({}),
    ),
    Case(21, ("9 requests failed",), "first dimension", llm({}, texts=TEXTS), llm({}, texts={})),
    Case(
        22,
        ("2 instances of tensorrt_llm on one device",),
        "tensorrt_llm: instance_group.count",
        llm({}, fields={"instance_group": instances(2)}),
        llm({}),
    ),
    Case(
        23,
        ("KV reuse is off", "60 % of prompt tokens repeat"),
        "parameters.enable_kv_cache_reuse",
        llm({"reused": 0}, {"enable_kv_cache_reuse": "false"}, router=REPEATS),
        llm({"reused": [0, 5, 9, 12, 20]}, {"enable_kv_cache_reuse": "true"}, router=REPEATS),
    ),
    Case(
        24,
        ("prompts of 6,000 tokens", "7 others generate"),
        "parameters.enable_chunked_context",
        llm(LONG, {"enable_chunked_context": "false"}),
        llm(LONG, {"enable_chunked_context": "true"}),
    ),
    Case(
        25,
        ("20 requests of 2,000 tokens need 40,000, it holds 10,240, that is 5 requests",),
        "requests at once",
        llm(CROWD),
        llm(CROWD | {"active": 5}),
    ),
)


# 26 to 39.
BLS = config("tensorrt_llm_bls", max_batch_size=0, dynamic_batching=None)
ENGINE = config(**LLM)
SERIAL = [ran("tensorrt_llm_bls", {1: (99, 100.0)}, 600.0), ran("tensorrt_llm", {1: (99, 0.2)})]
FLOWING = [ran("tensorrt_llm_bls", {1: (790, 100.0)}, 1.0), SERIAL[1]]
SINGLE = trt(**(HEALTHY | {"active": 1, "scheduled": 1}))
WHOLE = config(
    "ensemble",
    backend="",
    platform="ensemble",
    max_batch_size=8,
    dynamic_batching=None,
    instance_group=[],
    ensemble_scheduling={"step": [{"model_name": "preprocessing"}, {"model_name": "tensorrt_llm"}]},
)
BEFORE = config("preprocessing", dynamic_batching=None)
THROUGH = ran("ensemble", requests=490)
CHAIN = [WHOLE, BEFORE, ENGINE]
SLOW_STEP = [
    THROUGH,
    ran("preprocessing", {1: (490, 20.0)}, 200.0),
    ran("tensorrt_llm", {1: (490, 0.2)}),
]
FAST = [THROUGH, ran("preprocessing", {1: (490, 2.0)}, 0.1), SLOW_STEP[2]]
PYTHON = config(max_batch_size=0, dynamic_batching=None)
STREAMS = config(input=[{"name": "stream", "data_type": "TYPE_BOOL", "dims": [1]}])
DECOUPLED = config(
    max_batch_size=0, dynamic_batching=None, model_transaction_policy={"decoupled": True}
)
ANSWERS = ran(sizes={1: (50, 0.1)})
MEMORY = (
    'nv_gpu_memory_used_bytes{gpu_uuid="G"} 15e9\nnv_gpu_memory_total_bytes{gpu_uuid="G"} 16e9\n'
)
ROOMY = MEMORY.replace("15e9", "9e9")
BUSY, IDLE = ran(sizes={8: (430, 22.0)}, queue_ms=60.0), ran(sizes={1: (9, 20.0)})
HALF = trt(**HEALTHY)
ENTRY = config(
    "ensemble",
    backend="",
    platform="ensemble",
    instance_group=[],
    ensemble_scheduling={"step": [{"model_name": "tensorrt_llm"}]},
)
THROUGH_ENTRY = [ran("ensemble", requests=40), ran("tensorrt_llm", {1: (40, 0.2)})]
SYNCHRONOUS = ran(sizes={1: (450, 20.0)}, queue_ms=0.1)
FULL = ran(sizes={1: (1, 10.0), 8: (123, 80.0)}, queue_ms=120.0)
FLAT = ran(sizes={1: (1, 10.0), 8: (480, 20.0)}, queue_ms=30.0)


def two_workers(*figures: dict[str, Any], **facts: Any) -> Evidence:
    return pool(
        *(triton([config()], f, url=u) for f, u in zip(figures, URLS, strict=False)), **facts
    )


def two_configurations(**fields: Any) -> Evidence:
    return pool(
        triton([config()], QUIET, url=URLS[0]), triton([config(**fields)], QUIET, url=URLS[1])
    )


PYTHON_AND_POOL = (
    Case(
        26,
        (
            "tensorrt_llm_bls (600 ms each)",
            "1 instances run one each",
            "never has more than 1 active of 64",
        ),
        "tensorrt_llm_bls: instance_group.count",
        pool(triton([BLS, ENGINE], *SERIAL, gauges=SINGLE)),
        pool(triton([BLS | {"instance_group": instances(8)}, ENGINE], *FLOWING, gauges=HALF)),
    ),
    Case(
        27,
        ("4 workers", "60 requests a second of 20 ms"),
        "workers that get requests",
        two_workers(*[ran(sizes={1: (150, 20.0)}, queue_ms=1.0)] * 4),
        two_workers(*[QUIET] * 4),
    ),
    Case(
        28,
        ("9.8 of the ensemble's requests wait", "200 ms each", "98 % busy"),
        "preprocessing: instance_group.count",
        pool(triton(CHAIN, *SLOW_STEP, gauges=HALF)),
        pool(triton(CHAIN, *FAST, gauges=HALF)),
    ),
    Case(
        29,
        ("one request at a time", "90 % busy", "140 ms each"),
        "instance_group.count",
        single_model(PYTHON, ALONE),
        single_model(
            PYTHON | {"instance_group": instances(8)}, ran(sizes={1: (900, 20.0)}, queue_ms=1.0)
        ),
    ),
    Case(
        30,
        ("14 requests were refused",),
        "m: model_transaction_policy.decoupled",
        single_model(STREAMS, QUIET, texts={"decoupled": 14}),
        single_model(DECOUPLED, ANSWERS),
    ),
    Case(
        31,
        ("8 or more active at tensorrt_llm", "2 or fewer", "ensemble"),
        "model that clients call",
        pool(
            triton([ENTRY, ENGINE], *THROUGH_ENTRY, gauges=HALF),
            router=router(2, 2, by_url={URL: (2.0,) * 5}),
        ),
        pool(
            triton([ENTRY, ENGINE], *THROUGH_ENTRY, gauges=HALF),
            router=router(8, 8, by_url={URL: (8.0,) * 5}),
        ),
    ),
    Case(
        32,
        ("40 requests run in a model of 1",),
        "requests running in model.py",
        single_model(
            DECOUPLED,
            ANSWERS,
            router=router(40, 40, by_url={URL: (20.0, 25.0, 30.0, 35.0, 40.0)}),
        ),
        single_model(DECOUPLED, ANSWERS, router=router(3, 3, by_url={URL: (3.0,) * 5})),
    ),
    Case(
        33,
        ("3 instances of m", "93.8 % full"),
        "m: instance_group.count",
        single_model(config(instance_group=instances(3)), QUIET, MEMORY),
        single_model(config(instance_group=instances(3)), QUIET, ROOMY),
    ),
    Case(
        34,
        ("4 times",),
        "/dev/shm",
        single_model(config(), QUIET, texts={"shared_memory": 4}),
        single_model(config(), QUIET),
    ),
    Case(
        35,
        ("each of 1 client connections", "90 % busy"),
        "connections of clients",
        single_model(config(), SYNCHRONOUS),
        single_model(config(), TOGETHER),
    ),
    Case(
        36,
        ("batches are full", "a batch of 8 takes 80 ms, one of 1 10 ms"),
        None,
        single_model(config(), FULL),
        single_model(config(), FLAT),
    ),
    Case(
        37,
        ("http://gpu1:8000 has 28", "the 3 others"),
        "routing rule",
        two_workers(BUSY, IDLE, IDLE, IDLE),
        two_workers(TOGETHER, TOGETHER, TOGETHER, TOGETHER),
    ),
    Case(
        38,
        ("1 settings differ",),
        f"{URLS[1]} m: max_batch_size",
        two_configurations(max_batch_size=4),
        two_configurations(),
    ),
    Case(
        39,
        ("all the load", "the 1 others had none"),
        "what is balanced",
        two_workers(BUSY, ran()),
        two_workers(TOGETHER, TOGETHER),
    ),
)


def other_engines() -> dict[str, tuple[int, Evidence, Evidence]]:
    """Return the same causes at engines other than Triton: name -> cause, pool with it, pool
    without it.
    """
    vllm = "vllm:num_requests_running {r}\nvllm:num_requests_waiting {w}\n"
    vllm += "vllm:kv_cache_usage_perc {u}\n"
    vllm += 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000"}} 1\n'
    pre = "vllm:num_preemptions_total {p}\n"
    sglang = "sglang:num_running_reqs {r}\nsglang:num_queue_reqs {w}\nsglang:token_usage {u}\n"

    def v(r: int, w: int, u: float, p: tuple[int, int] = (0, 0)) -> Evidence:
        pages = [(vllm + pre).format(r=r, w=w, u=u, p=p[look > 0]) for look in range(LOOKS + 1)]
        return pool(plain("vllm", pages))

    def s(r: int, w: int, u: float, **settings: str) -> Evidence:
        return pool(plain("sglang", sglang.format(r=r, w=w, u=u), **settings))

    return {
        "vllm preempts": (15, v(30, 9, 0.99, (5, 95)), v(30, 0, 0.9)),
        "vllm's batch is small": (16, v(4, 12, 0.1), v(16, 0, 0.4)),
        "sglang's batch is small": (
            16,
            s(4, 12, 0.1, max_running_requests="4"),
            s(16, 0, 0.4, max_running_requests="64"),
        ),
        "sglang reuses nothing": (
            23,
            s(8, 0, 0.4, disable_radix_cache="True"),
            s(8, 0, 0.4, disable_radix_cache="False"),
        ),
    }


CASES = (*SCHEDULER, *ENGINES, *PYTHON_AND_POOL)
