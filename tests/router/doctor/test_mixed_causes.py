"""Tests of several causes at once: the doctor first names the one whose removal admits most
requests.

They also cover what looks like a cause and is none.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from router.doctor.evidence import Evidence
from router.doctor.judge import judge
from tests.router.doctor.catalogue import (
    ALONE,
    FREE,
    LLM,
    MEMORY,
    QUIET,
    TOGETHER,
    llm,
    single_model,
)
from tests.router.doctor.pools import (
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


class Mixed(NamedTuple):
    """Causes in the order in which they must be named, and a pool that has them."""

    numbers: tuple[int, ...]
    evidence: Evidence


_OLD = {"max_tokens_in_paged_kv_cache": "2560"}
_TIGHT = {"active": 8, "scheduled": 1, "kv_max": 40, "kv_used": 33, **lengths(1000, 1060)}
_SMALL = {"active": 20, "scheduled": 4, "max": 4, "kv_used": 100}
_ENGINE = config(**LLM)
_BLS = config("tensorrt_llm_bls", max_batch_size=0, dynamic_batching=None)
_NO_BATCHER = config(dynamic_batching=None)
_QUEUE = {"default_queue_policy": {"max_queue_size": 2, "default_timeout_microseconds": 50_000}}
_WAITING = ran("n", sizes={1: (100, 20.0)}, queue_ms=60.0)

MIXED = {
    "memory for one, and a policy that is none": Mixed(
        (13, 19), llm(_TIGHT, {**_OLD, "batch_scheduler_policy": "static_batch"})
    ),
    "memory for one, and two copies": Mixed(
        (13, 22), llm(_TIGHT, _OLD, fields={"instance_group": instances(2)})
    ),
    "a small batch, and long prompts whole": Mixed(
        (16, 24), llm(_SMALL | {**lengths(4000, 10)}, {"enable_chunked_context": "false"})
    ),
    "a small batch, and an unfilled template": Mixed(
        (16, 19), llm(_SMALL, {"kv_cache_free_gpu_mem_fraction": "${kv_cache_fraction}"})
    ),
    "two models without the batcher, the busier first": Mixed(
        (1, 1),
        pool(triton([_NO_BATCHER, _NO_BATCHER | {"name": "n"}], _WAITING, ALONE)),
    ),
    "no batcher, and no memory left": Mixed(
        (1, 33),
        pool(triton([_NO_BATCHER | {"instance_group": instances(3)}], ALONE, gauges=MEMORY)),
    ),
    "shapes, and a queue that refuses": Mixed(
        (3, 8),
        single_model(
            config(input=FREE, dynamic_batching=_QUEUE),
            ALONE,
            router=router(8, 8, refused={URL: 5.0}),
        ),
    ),
    "BLS, before an engine whose template is unfilled": Mixed(
        (26, 19),
        pool(
            triton(
                [_BLS, _ENGINE | {"parameters": parameters(decoding_mode="${decoding_mode}")}],
                ran("tensorrt_llm_bls", {1: (99, 100.0)}, 600.0),
                ran("tensorrt_llm", {1: (99, 0.2)}),
                gauges=trt(active=1, scheduled=1, max=64, kv_max=1000, kv_used=9, tokens_per=64),
            )
        ),
    ),
    "one worker has all, and they differ": Mixed(
        (37, 38),
        pool(
            triton([config()], ran(sizes={8: (430, 22.0)}, queue_ms=60.0), url=URLS[0]),
            triton([config(max_batch_size=4)], ran(sizes={1: (9, 20.0)}), url=URLS[1]),
        ),
    ),
    "refusals of two kinds": Mixed(
        (8, 9),
        single_model(
            config(dynamic_batching=_QUEUE),
            TOGETHER,
            router=router(8, 8, refused={URL: 90.0}),
            texts={"queue_timeout": 12},
        ),
    ),
    "static batching of a batch that is small": Mixed(
        (16, 18), llm(_SMALL | {"static": 3}, {"gpt_model_type": "V1"})
    ),
    "reserved outputs, and shared memory": Mixed(
        (14, 34), llm({"active": 20, "scheduled": 4, "kv_used": 100}, texts={"shared_memory": 2})
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_the_cause_whose_removal_admits_most_requests_is_first(name: str) -> None:
    found = judge(MIXED[name].evidence)
    assert tuple(one.number for one in found) == MIXED[name].numbers
    admits = [one.found.admits for one in found]
    assert admits == sorted(admits, reverse=True)


def test_the_busier_of_two_models_is_first() -> None:
    first, second = judge(MIXED["two models without the batcher, the busier first"].evidence)
    assert (first.where, second.where) == (f"{URL} m", f"{URL} n")


_STILL = trt(still=True, active=8, scheduled=1, max=64, kv_max=40, kv_used=33, tokens_per=64)
_IDLE = trt(still=True, active=0, scheduled=0, max=64, kv_max=0, kv_used=0, tokens_per=0)
_COPIES = _ENGINE | {
    "instance_group": instances(2),
    "parameters": parameters(gpu_device_ids="0;1"),
}
_BUSY = {"active": 40, "scheduled": 40, "max": 64, "kv_max": 500, "kv_used": 300, "tokens_per": 64}
_TWICE = [2 * page for page in trt(**_BUSY)]
_CALM = trt(**(_BUSY | {"active": 2, "scheduled": 2, "kv_used": 9, "iteration": 3}))
_IN_TURN = [
    calm if look % 2 else busy
    for look, (busy, calm) in enumerate(zip(trt(**_BUSY), _CALM, strict=True))
]
_ENSEMBLE = config(
    "ensemble",
    backend="",
    platform="ensemble",
    instance_group=[],
    dynamic_batching=None,
    ensemble_scheduling={"step": [{"model_name": "m"}]},
)
HEALTHY = {
    "batch 1 at the TensorRT-LLM backend, which says so of every request": llm({}),
    "short answers, of which one or two wait for their first step": llm(
        {"active": [7, 7, 8, 6, 8], "scheduled": [7, 6, 8, 6, 6], "kv_used": 1}
    ),
    "gauges that stand still since the last request": pool(
        triton([_ENGINE], ran("tensorrt_llm"), gauges=_STILL)
    ),
    "sizes that are 0 before the first request": pool(
        triton([_ENGINE], ran("tensorrt_llm"), gauges=_IDLE)
    ),
    "an ensemble, whose queue is none": pool(
        triton([_ENSEMBLE, config()], ran("ensemble", requests=800), QUIET)
    ),
    "nothing but the warm-up": single_model(config(), ran()),
    "a decoupled Python model, whose times end early": single_model(
        config(
            max_batch_size=0,
            dynamic_batching=None,
            model_transaction_policy={"decoupled": True},
        ),
        ran(sizes={1: (300, 0.1)}),
    ),
    "copies of a Python model that are busy one by one": single_model(
        config(instance_group=instances(4)), ran(sizes={4: (1500, 21.0)}, queue_ms=9.0)
    ),
    "copies of an engine, each on devices of its own": llm(
        {}, {"gpu_device_ids": "0,1;2,3"}, fields={"instance_group": instances(2)}
    ),
    "an engine on each of two devices": llm(
        {}, fields={"instance_group": instances(1, gpus=[0, 1])}
    ),
    "copies whose gauges have the same labels": pool(
        triton([_COPIES], ran("tensorrt_llm", {1: (40, 0.2)}), gauges=_TWICE)
    ),
    "copies that write the same gauges in turn": pool(
        triton([_COPIES], ran("tensorrt_llm", {1: (40, 0.2)}), gauges=_IN_TURN)
    ),
    "an idle vLLM": pool(
        plain("vllm", "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
    ),
    "one idle worker beside a calm one": pool(
        triton([config()], QUIET, url=URLS[0]), triton([config()], ran(), url=URLS[1])
    ),
}


def test_the_block_size_of_two_instances_is_not_summed() -> None:
    pages = [2 * page for page in trt(**(_BUSY | {"active": 60, "kv_used": 480}))]
    made = pool(triton([_COPIES], ran("tensorrt_llm"), gauges=pages), max_tokens=800.0)
    found = judge(made)[0]
    assert found.number == 25
    assert "it holds 64,000, that is" in found.found.evidence  # 2 x 500 blocks of 64


@pytest.mark.parametrize("name", HEALTHY)
def test_false_alarms_are_not_raised(name: str) -> None:
    assert judge(HEALTHY[name]) == ()


_SMALLER = trt(**(_BUSY | {"active": 8, "scheduled": 1, "kv_max": 40, "kv_used": 33}))


@pytest.mark.parametrize(
    ("pages", "numbers"),
    [
        ([*_SMALLER[:2], *trt(**_BUSY)[2:]], []),  # loaded anew, with a larger cache
        ([*trt(**_BUSY)[:2], *_SMALLER[2:]], [13]),  # with a smaller one
        (_SMALLER, [13]),
    ],
)
def test_an_engine_has_no_finding_for_gauges_of_its_predecessor(
    pages: list[str], numbers: list[int]
) -> None:
    made = pool(
        triton([_ENGINE], ran("tensorrt_llm"), gauges=pages), max_tokens=1060.0, input_tokens=1000.0
    )
    assert [found.number for found in judge(made)] == numbers


@pytest.mark.parametrize("singles", [0, 1, 3, 200])
def test_cached_answers_are_not_reported_as_too_little_load(singles: int) -> None:
    """Requests that the response cache answers are not reported as too little load: few requests
    execute, because the cache answers the others.
    """
    configured = config(response_cache={"enable": True}, instance_group=instances(2))
    figures = ran(sizes={1: (singles, 20.0)}, queue_ms=1.0, cache_hits=4000)
    assert [found.number for found in judge(single_model(configured, figures))] == [12]


def test_too_little_load_is_reported_beside_a_rarely_used_cache() -> None:
    figures = ran(sizes={1: (75, 20.0)}, queue_ms=1.0, cache_hits=25)
    found = judge(single_model(config(response_cache={"enable": True}), figures))
    assert sorted(each.number for each in found) == [7, 12]


@pytest.mark.parametrize(("count", "numbers"), [(2, [12]), (60, [12, 6])])
def test_only_executed_requests_count_when_judging_concurrency(
    count: int, numbers: list[int]
) -> None:
    """Only requests that execute count when the doctor judges whether requests meet: answers from
    the cache neither add executions nor company.
    """
    delayed = {"max_queue_delay_microseconds": "20000"}
    configured = config(response_cache={"enable": True}, dynamic_batching=delayed)
    figures = ran(sizes={1: (count, 20.0)}, queue_ms=20.0, cache_hits=4000)
    assert {found.number for found in judge(single_model(configured, figures))} == set(numbers)


def test_answers_from_the_cache_do_not_hide_waiting_requests() -> None:
    """Answers from the cache do not hide that requests wait: they count as requests without a wait,
    so if nine of ten are cached, a wait of three batches looks like a third of a batch.
    """
    configured = config(response_cache={"enable": True}, dynamic_batching=None)
    figures = ran(sizes={1: (100, 20.0)}, queue_ms=60.0, cache_hits=900)
    assert [found.number for found in judge(single_model(configured, figures))] == [1, 12]


@pytest.mark.parametrize(("joined", "numbers"), [(8, [5]), (100, [])])
def test_a_few_slow_batches_do_not_set_the_batch_time(joined: int, numbers: list[int]) -> None:
    """A few slow batches do not tell how long batches take: the few batches with several requests
    ran while the machine paused.
    """
    configured = config(instance_group=instances(4))
    figures = ran(sizes={1: (700, 20.0), 2: (joined, 36.0)}, queue_ms=10.0)
    assert [found.number for found in judge(single_model(configured, figures))] == numbers
