"""Tests of a model that calls other models of its server: its time of waiting does not count as its
own work.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.doctor.evidence import Evidence
from router.doctor.judge import judge
from router.doctor.report import Finding
from tests.router.doctor.pools import URLS, config, instances, pool, ran, triton, trt

# In ten seconds, as seen at a real tritonserver: a wrapper of 24 clients, full batches of it, and
# batches of several sizes whose requests are passed on one by one.
FULL = ran("wrapper", {8: (170, 58.0)}, 150.0)
MIXED = ran("wrapper", {1: (12, 7.0), 8: (168, 58.0)}, 150.0)
ONE_BY_ONE = ran("inner", {1: (1_360, 5.8)}, 0.3)
WRAPPER, INNER = config("wrapper"), config("inner")


def causes_by_model(found: tuple[Finding, ...]) -> list[tuple[int, str]]:
    """Return the cause number and the model of each finding."""
    return [(one.number, one.where.rpartition(" ")[2]) for one in found]


def evidence_of(*models: tuple[dict[str, Any], dict[str, Any]], gauges: Any = "") -> Evidence:
    return pool(triton([c for c, _ in models], *(figures for _, figures in models), gauges=gauges))


@pytest.mark.parametrize("figures", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("batcher", [{}, {"dynamic_batching": None}], ids=["batcher", "none"])
def test_a_wrapper_that_calls_a_model_request_by_request_is_found(
    figures: dict[str, Any], batcher: dict[str, Any]
) -> None:
    """The doctor names a model that calls another one request by request, and neither its
    computation nor the clients of the other model.
    """
    found = judge(evidence_of((config("wrapper", **batcher), figures), (INNER, ONE_BY_ONE)))
    assert causes_by_model(found) == [(26, "wrapper")]
    assert "inner has 0.83 at a time of 8" in found[0].found.evidence
    change = found[0].found.changes[0]
    assert (change.name, change.now, change.to) == ("wrapper: instance_group.count", "1", "8")


def test_a_wrapper_without_batching_is_found_too() -> None:
    one_by_one = ran("wrapper", {1: (900, 11.0)}, 330.0), ran("inner", {1: (900, 7.0)}, 0.4)
    bare = config("wrapper", dynamic_batching=None)
    assert causes_by_model(judge(evidence_of((bare, one_by_one[0]), (INNER, one_by_one[1])))) == [
        (26, "wrapper")
    ]
    both = (bare | {"max_batch_size": 0}, one_by_one[0]), (INNER, one_by_one[1])
    assert causes_by_model(judge(evidence_of(*both))) == [(26, "wrapper")]


def test_a_wrapper_that_calls_two_models_in_turn_is_not_compute_bound() -> None:
    one, two = (config(name, dynamic_batching=None) for name in ("one", "two"))
    figures = ran("one", {1: (1_360, 3.0)}), ran("two", {1: (1_360, 3.0)})
    found = judge(evidence_of((WRAPPER, MIXED), (one, figures[0]), (two, figures[1])))
    assert 36 not in [number for number, _ in causes_by_model(found)]


WHOLE = ran("wrapper", {8: (370, 26.6)}, 147.0, requests=370)  # clients send batches of 8


@pytest.mark.parametrize("figures", [WHOLE, MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize(
    "asked",
    [
        (INNER, ran("inner", {8: (370, 23.3)}, 0.6, requests=370)),
        (config("inner", instance_group=instances(2)), ran("inner", {4: (2_000, 6.0)}, 20.0)),
        (config("inner", max_batch_size=0, dynamic_batching=None), ran("inner", {1: (999, 9.0)})),
    ],
    ids=["busy", "in vain", "bare"],
)
def test_a_wrapper_that_waits_for_a_model_is_not_compute_bound(
    figures: dict[str, Any], asked: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    found = causes_by_model(judge(evidence_of((WRAPPER, figures), asked)))
    assert 36 not in [number for number, _ in found]
    assert (26, "wrapper") not in found, "the other has no room"


def test_a_wrapper_that_waits_for_an_engine_is_not_compute_bound() -> None:
    """The doctor recognizes a model that waits for an engine by the engine's gauges, or by the
    count of requests if there are none.
    """
    streamed = ran("tensorrt_llm", {1: (1_350, 0.2)})
    engine = config("tensorrt_llm", model_transaction_policy={"decoupled": True})
    shown = trt(active=8, scheduled=8, max=8, kv_max=1000, kv_used=300, tokens_per=64)
    for gauges in (shown, ""):
        found = judge(evidence_of((WRAPPER, MIXED), (engine, streamed), gauges=gauges))
        assert 36 not in [number for number, _ in causes_by_model(found)]


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_a_model_that_calls_no_other_model_is_compute_bound(backend: str) -> None:
    model = config("wrapper", backend=backend)
    assert causes_by_model(judge(evidence_of((model, MIXED)))) == [(36, "wrapper")]
    beside = (INNER, ran("inner", {1: (80, 21.0)}, 8.0))  # has requests now and then
    assert (36, "wrapper") in causes_by_model(judge(evidence_of((model, MIXED), beside)))


def test_only_python_backends_count_as_calling_other_models() -> None:
    other = config("wrapper", backend="onnxruntime"), MIXED
    assert (36, "wrapper") in causes_by_model(judge(evidence_of(other, (INNER, ONE_BY_ONE))))


def test_a_model_with_its_own_clients_keeps_its_causes() -> None:
    """A model with clients of its own keeps its causes: the requests of two independent models are
    not counted for each other.
    """
    alone = config("wrapper", dynamic_batching=None), ran("wrapper", {1: (450, 20.0)}, 140.0)
    other = INNER, ran("inner", {1: (290, 20.0)}, 0.3)
    assert (1, "wrapper") in causes_by_model(judge(evidence_of(alone, other)))
    clients = evidence_of((WRAPPER, FULL), (INNER, ran("inner", {1: (450, 20.0)}, 0.3)))
    assert (35, "inner") in causes_by_model(judge(clients))


LONE = ran("m", {1: (50, 20.0)}, 100.0)
DELAY = {"max_queue_delay_microseconds": 100_000}


@pytest.mark.parametrize(
    ("sizes", "largest", "advised"),
    [([], 16, None), ([16], 16, None), ([8], 16, "[8]"), ([4, 16], 16, "[4, 16]")],
)
def test_preferred_batch_sizes_added_by_triton_are_not_advised_against(
    sizes: list[int], largest: int, advised: str | None
) -> None:
    """The doctor does not advise against the preferred batch size that Triton itself adds if none
    is written, since leaving it out changes nothing.
    """
    batcher = DELAY | {"preferred_batch_size": sizes}
    model = config(dynamic_batching=batcher, max_batch_size=largest)
    found = judge(evidence_of((model, LONE)))[0]
    assert found.number == 6
    names = {change.name: change.now for change in found.found.changes}
    assert names.pop("dynamic_batching.max_queue_delay_microseconds") == "100000"
    assert names.get("dynamic_batching.preferred_batch_size") == advised


def test_values_added_by_triton_are_not_differences_between_workers() -> None:
    configs = [
        config(max_batch_size=most, dynamic_batching={"preferred_batch_size": [most]})
        for most in (8, 4)
    ]
    figures = ran(sizes={4: (200, 21.0)}, queue_ms=8.0)
    each = [triton([one], figures, url=url) for one, url in zip(configs, URLS, strict=False)]
    (found,) = judge(pool(*each))
    assert found.number == 38
    assert [change.name for change in found.found.changes] == [f"{URLS[1]} m: max_batch_size"]
