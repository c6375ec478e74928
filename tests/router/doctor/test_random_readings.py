"""Tests that the doctor ends with printable findings, or with none, whatever servers answer."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.doctor.evidence import Evidence
from router.doctor.judge import judge
from router.doctor.report import DoctorReport
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

SMALL, SHARE = st.integers(0, 40), st.sampled_from([0.0, 0.05, 0.3, 0.8, 0.99, 1.0])
TIMES = st.sampled_from([0.0, 0.2, 5.0, 20.0, 900.0])
SIZES = st.dictionaries(st.integers(1, 8), st.tuples(st.integers(0, 300), TIMES), max_size=3)
FIGURES = st.builds(
    ran,
    name=st.just("m"),
    sizes=SIZES,
    queue_ms=TIMES,
    failed=SMALL,
    cache_hits=SMALL,
)
QUEUE = st.fixed_dictionaries(
    {},
    optional={
        "max_queue_delay_microseconds": st.sampled_from([0, 1000, 10**6]),
        "preferred_batch_size": st.just([4, 8]),
        "default_queue_policy": st.just(
            {"max_queue_size": 3, "default_timeout_microseconds": 10_000}
        ),
    },
)
TENSORS = st.sampled_from(
    [[{"name": "stream", "dims": [-1]}], [{"name": "x", "optional": True}], []]
)
VALUES = st.sampled_from(["", "0", "nan", "-1", "1e400", "true", "false", "${x}", "V1", "2560"])
NAMES: tuple[str, ...] = (
    "max_tokens_in_paged_kv_cache",
    "batch_scheduler_policy",
    "enable_kv_cache_reuse",
)
NAMES += ("enable_chunked_context", "max_num_tokens", "decoupled")
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from(["python", "tensorrtllm", ""]),
        "max_batch_size": st.integers(0, 8),
        "dynamic_batching": st.one_of(st.none(), QUEUE),
        "sequence_batching": st.sampled_from([None, {"oldest": {}}, {"direct": {}}]),
        "instance_group": st.builds(
            instances, st.integers(0, 4), rate_limiter=st.sampled_from([None, {"resources": 5}])
        ),
        "model_transaction_policy": st.sampled_from([{"decoupled": True}, {}]),
        "input": TENSORS,
        "parameters": st.dictionaries(st.sampled_from(NAMES), VALUES).map(
            lambda given: parameters(**given)
        ),
    },
)
KINDS: tuple[str, ...] = (
    "active",
    "scheduled",
    "context",
    "max",
    "kv_max",
    "kv_used",
    "tokens_per",
    "reused",
)
KINDS += ("paused", "generation", "context_tokens", "static")
GAUGES = st.dictionaries(
    st.sampled_from(KINDS), st.lists(SMALL, min_size=LOOKS + 1, max_size=LOOKS + 1)
)
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "texts": st.dictionaries(
            st.sampled_from(["queue_full", "queue_timeout", "decoupled", "batch_dimension"]), SMALL
        ),
        "router": st.builds(
            router,
            st.floats(0, 50),
            st.floats(0, 50),
            by_url=st.just({URL: (0.0, 3.0, 9.0)}),
            refused=st.just({URL: 4.0}),
        ),
        "concurrency": SMALL,
        "connections": SMALL,
        "max_tokens": st.sampled_from([0.0, 100.0, 1e9]),
        "max_num_tokens": st.sampled_from([0.0, 8192.0]),
        "shapes": st.integers(1, 4),
        "input_sets": st.integers(1, 4),
        "latencies": st.dictionaries(st.sampled_from([1, 2, 8]), TIMES),
    },
)


def gauge_pages(gauges: dict[str, Any]) -> list[str]:
    """Return metrics pages of the engine `m` with these gauges."""
    return trt("m", **gauges)


def check_report(evidence: Evidence) -> None:
    """Run the doctor on the evidence and check the properties of any report."""
    findings = judge(evidence)
    report = DoctorReport(evidence, findings, 10.0)
    assert json.loads(json.dumps(report.shown(), allow_nan=False))["loaded"] == evidence.loaded
    assert report.text()
    admits = [one.found.admits for one in findings]
    assert all(math.isfinite(one) and one >= 0 for one in admits), findings
    if not evidence.loaded:
        assert findings == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_triton_readings_give_printable_findings(data: st.DataObject) -> None:
    def one(url: str) -> Any:
        made = config("m", **data.draw(CONFIGS))
        gauges = data.draw(st.one_of(st.just(""), st.builds(gauge_pages, GAUGES)))
        return triton([made], data.draw(FIGURES), gauges=gauges, url=url)

    count = data.draw(st.integers(1, 3))
    check_report(pool(*(one(url) for url in URLS[:count]), **data.draw(FACTS)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_readings_of_other_engines_give_printable_findings(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["vllm", "warmroute", "sglang"]))
    wanted = (
        ["sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_retracted_reqs"]
        if kind == "sglang"
        else [
            *("vllm:num_requests_running", "vllm:num_requests_waiting"),
            *("vllm:num_preemptions_total", "vllm:request_success_total"),
            *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
            'warmroute_engine_not_scheduled_total{reason="token_budget"}',
            'warmroute_engine_requests{kind="max"}',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"}',
        ]
    )
    share = "sglang:token_usage" if kind == "sglang" else "vllm:kv_cache_usage_perc"
    pages = []
    for _ in range(LOOKS + 1):
        names = data.draw(st.lists(st.sampled_from(wanted), unique=True))
        lines = [f"{name} {data.draw(SMALL)}" for name in names]
        pages.append("\n".join([*lines, f"{share} {data.draw(SHARE)}", ""]))
    told = data.draw(st.sampled_from([{}, {"max_running_requests": "4"}]))
    check_report(pool(plain(kind, pages, **told), **data.draw(FACTS)))


def test_token_counts_from_before_the_observation_are_not_counted() -> None:
    gauges = trt(active=8, scheduled=8, max=64, **lengths(1000, 60))
    (engine,) = pool(triton([config("tensorrt_llm")], gauges=gauges)).servers[0].engines
    assert (engine.input_tokens, engine.output_tokens) == (1000, 60)
