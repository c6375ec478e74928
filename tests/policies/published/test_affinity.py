"""Tests of published rules that follow the cache until the load is too high, against costs computed
by hand.
"""

from __future__ import annotations

import numpy as np
import pytest

from policies.facts import WorkerChange
from policies.pick import pick
from policies.published.aibrix import Aibrix
from policies.published.cache_aware import CacheAware
from policies.published.least_load import LeastLoad
from policies.published.least_tokens import LeastTokens
from policies.published.llm_d import LlmD
from policies.published.llm_d_sticky import LlmDSticky
from policies.published.order import places
from policies.published.ray_prefix import RayPrefix
from policies.published.trt_llm import AHEAD, TrtLlm
from tests.policies.fleet import fleet_of, request_of
from tests.policies.published.holder import costs_of, leaves_holder_at, sent
from tests.policies.wide import wide_fleet

NAN = np.nan


def test_equal_values_share_a_rank():
    first, second = np.array([1, 0, 1, 0, 2]), np.array([5.0, 7.0, 5.0, 3.0, 0.0])
    assert places(first, second).tolist() == [2.0, 1.0, 2.0, 0.0, 3.0]
    assert places(np.zeros(0)).tolist() == []


def test_trt_llm_subtracts_the_matching_share_from_the_load():
    # 999 tokens can match: 63 blocks of 16, 1,008 tokens.
    columns = {"hit_tokens": [504, 0, 0], "running": [48, 8, 16], "waiting": [0, 4, 0]}
    costs = costs_of(TrtLlm(), **columns)
    assert costs == pytest.approx([0.75 - 0.5, 12 / 64 - AHEAD, 0.25], abs=1e-12)
    assert costs_of(TrtLlm(max_batch_size=128), **columns) == pytest.approx(
        [48 / 128 - 0.5 - AHEAD, 12 / 128, 16 / 128], abs=1e-12
    )


def test_trt_llm_alternates_between_equal_workers():
    chosen = [
        pick(np.array(costs_of(TrtLlm(), request_of(serial=s), running=[3, 2, 2, 2])), 0.0)
        for s in range(6)
    ]
    assert chosen == [1, 2, 3, 1, 2, 3]


def test_trt_llm_leaves_the_cached_worker_at_its_spill_depth():
    # 64 * 850 / 1008 = 53.97, and never mind how long the prompt is.
    assert leaves_holder_at(TrtLlm()) == 54
    long = request_of(prompt_tokens=100_001)
    assert leaves_holder_at(TrtLlm(), request=long, hit_tokens=85_000) in (54, 55)


def test_cache_aware_takes_the_longest_match_then_the_fewer_requests():
    columns = {"hit_tokens": [640, 800, 800, 0], "running": [0, 9, 4, 0]}
    assert costs_of(CacheAware(), **columns) == [2.0, 1.0, 0.0, 3.0]


def test_cache_aware_takes_the_smallest_tree_if_the_match_is_short():
    policy = CacheAware(max_tree_tokens=1_000.0)
    state = sent(policy, (0, 700, None), (1, 300, None), (0, 200, None))
    columns = {"hit_tokens": [288, 0, 0, 0], "running": [0, 0, 5, 2]}
    # 288 of 1,000 is no match; trees 900, 300, 0, 0, of which the last has fewer requests.
    assert costs_of(policy, state=state, **columns) == [3.0, 2.0, 1.0, 0.0]
    assert costs_of(policy, state=state, **(columns | {"hit_tokens": [304, 0, 0, 0]}))[0] == 0.0
    sent(policy, (1, 9_999, None), state=state)  # no tree grows beyond its bound
    state = policy.observe(WorkerChange(9.0, 0, "gone"), state)
    assert costs_of(policy, state=state, hit_tokens=[0, 0, 0]) == [0.0, 1.0, 0.0]
    assert state.sizes(fleet_of(worker_id=[0, 1])).tolist() == [0.0, 1_000.0]


@pytest.mark.parametrize("idle_workers", [1, 7])
def test_cache_aware_leaves_the_cached_worker_at_its_spill_depth(idle_workers):
    assert leaves_holder_at(CacheAware(), idle_workers) == 65
    assert leaves_holder_at(CacheAware(balance_abs=32), idle_workers) == 33


def test_cache_aware_spills_only_beyond_the_relative_difference_too():
    columns = {"hit_tokens": [850, 0], "running": [265, 200]}
    assert costs_of(CacheAware(), **columns) == [0.0, 1.0]
    assert costs_of(CacheAware(balance_rel=1.3), **columns) == [265.0, 200.0]


def test_cache_aware_spills_by_kv_ceiling_or_kv_spread():
    columns = {
        "hit_tokens": [850, 0, 0],
        "running": [3, 1, 2],
        "kv_used_tokens": [95.0, 30.0, NAN],
        "kv_capacity_tokens": 100.0,
    }
    by_load, by_cache = [3.0, 1.0, 2.0], [0.0, 1.0, 2.0]
    assert costs_of(CacheAware(), **columns) == by_cache
    assert costs_of(CacheAware(kv_ceiling=0.9), **columns) == by_load
    assert costs_of(CacheAware(kv_ceiling=0.96), **columns) == by_cache
    assert costs_of(CacheAware(kv_spread=0.5), **columns) == by_load
    assert costs_of(CacheAware(kv_spread=0.66), **columns) == by_cache
    unsaid = columns | {"kv_used_tokens": NAN}
    assert costs_of(CacheAware(kv_ceiling=0.1, kv_spread=0.1), **unsaid) == by_cache


def test_least_load_adds_queue_drain_time_and_kv_barrier():
    columns = {
        "queued_prefill_tokens": [3_000.0, 0.0, 1_000.0, 0.0],
        "prefill_tokens_per_s": [10_000.0, 10_000.0, 5_000.0, 10_000.0],
        "kv_used_tokens": [50.0, 90.0, NAN, 200.0],
        "kv_capacity_tokens": 100.0,
        "hit_tokens": [999, 0, 0, 0],
    }
    # k / (1 - k): 1, 9, unknown and so 0, and capped at 999.
    assert costs_of(LeastLoad(), **columns) == pytest.approx([0.45, 1.35, 0.2, 149.85])
    fixed = LeastLoad(kv_weight_s=0.0, tokens_per_s=2_000.0)
    assert costs_of(fixed, **columns) == pytest.approx([1.5, 0.0, 0.5, 0.0])
    assert leaves_holder_at(LeastLoad(), hit_tokens=999) is None, "it does not look at requests"


def test_least_tokens_counts_queued_and_resident_tokens():
    columns = {"queued_prefill_tokens": [700.0, 0.0], "context_tokens": [20.0, 900.0]}
    assert costs_of(LeastTokens(), **columns, hit_tokens=[0, 999], running=[9, 0]) == [720.0, 900.0]


def test_aibrix_takes_the_best_match_among_workers_without_outlying_load():
    # Mean 4, deviation sqrt((0 + 16 + 4 + 4) / 4) = 2.45: at most 6.
    columns = {"hit_tokens": [640, 800, 0, 320], "running": [4, 8, 2, 2]}
    assert costs_of(Aibrix(), **columns) == [0.0, 3.0, 2.0, 1.0]
    # 8 are within two deviations, 8.9.
    assert costs_of(Aibrix(deviations=2.0), **columns) == [1.0, 0.0, 3.0, 2.0]


def test_aibrix_takes_the_least_loaded_only_if_loads_differ_much():
    # 12 is above 2 * (3.75 + 1) and 12 more than the fewest.
    columns = {"hit_tokens": [800, 640, 320, 320], "running": [12, 3, 0, 0]}
    assert costs_of(Aibrix(), **columns) == [2.0, 1.0, 0.0, 0.0]
    assert costs_of(Aibrix(imbalance_gap=13), **columns) == [2.0, 0.0, 1.0, 1.0]
    # 2 * (7.75 + 1) = 17.5 is not reached; by the gap alone it is.
    even = columns | {"running": [16, 7, 4, 4]}
    assert costs_of(Aibrix(), **even) == [2.0, 0.0, 1.0, 1.0]
    assert costs_of(Aibrix(imbalance_factor=0.0), **even) == [2.0, 1.0, 0.0, 0.0]


def test_aibrix_leaves_the_cached_worker_at_its_spill_depth():
    assert leaves_holder_at(Aibrix(), idle_workers=7) == 1
    assert leaves_holder_at(Aibrix(deviations=3.0), idle_workers=7) == 8
    # Of two workers the busier one lies one deviation above the mean, always within the limit;
    # no gap is above twice a mean of half of it.
    assert leaves_holder_at(Aibrix()) is None
    assert leaves_holder_at(Aibrix(imbalance_factor=0.0)) == 8


def test_ray_prefix_takes_the_longest_match_the_smallest_tenant_or_two_choices():
    policy = RayPrefix()
    columns = {"hit_tokens": [112, 112, 0], "running": [4, 3, 0]}
    assert costs_of(policy, **columns) == [1.0, 0.0, 2.0]
    state = sent(policy, (2, 500, None), (0, 400, None))
    short = columns | {"hit_tokens": [96, 0, 0]}
    assert costs_of(policy, state=state, **short) == [1.0, 0.0, 2.0]
    assert costs_of(policy, **short) == [2.0, 1.0, 0.0], "no tenant yet: the fewest requests"
    apart = columns | {"running": [11, 3, 0]}
    # Rows 0 and 2 are drawn.
    assert costs_of(policy, request_of(draw=0.2), **apart) == [11.0, np.inf, 0.5]


def test_ray_prefix_without_a_match_takes_the_smallest_tree_at_threshold_0():
    state = sent(RayPrefix(), (0, 10, None))
    assert costs_of(RayPrefix(match_threshold=0.0), state=state, hit_tokens=[0, 0]) == [1.0, 0.0]


def test_ray_prefix_leaves_the_cached_worker_at_its_spill_depth():
    assert leaves_holder_at(RayPrefix()) == 11
    assert leaves_holder_at(RayPrefix(imbalance=3)) == 4


def test_llm_d_sticky_stays_until_the_backlog_is_seconds_behind():
    columns = {
        "hit_tokens": [960, 800, 0, 640],
        "queued_prefill_tokens": [5_000.0, 180_000.0, 0.0, 0.0],
        "prefill_tokens_per_s": 10_000.0,
    }
    # A holder 0.3 s behind: only the first two hold 0.8; the others rank behind the worse of these.
    behind = 180_201.0
    assert costs_of(LlmDSticky(), **columns) == [
        *(5_040.0, 180_200.0, behind + 1_000.0, behind + 360.0)
    ]
    everyone = [5_040.0, 180_200.0, 1_000.0, 360.0]
    assert costs_of(LlmDSticky(patience_s=0.3), **columns) == everyone  # 0.314 at 15,928/s
    assert costs_of(LlmDSticky(patience_s=0.4), **columns)[2] > behind
    assert costs_of(LlmDSticky(patience_s=0.4, tokens_per_s=None), **columns) == everyone
    assert costs_of(LlmDSticky(patience_s=0.4, tokens_per_s=20_000.0), **columns)[2] > behind
    assert costs_of(LlmDSticky(patience_s=0.0), **columns)[2] > behind, "0 turns the gate off"
    assert costs_of(LlmDSticky(match_threshold=0.97), **columns) == everyone


def test_llm_d_sticky_measures_the_match_in_blocks():
    # 800 of 1,000 tokens are 50 of 62 blocks; the whole prompt is one token short of 62.
    half = {"hit_tokens": [800, 0]}
    assert costs_of(LlmDSticky(match_threshold=0.806), **half) == [200.0, 2_001.0]
    assert costs_of(LlmDSticky(match_threshold=0.807), **half) == [200.0, 1_000.0]
    whole = request_of(prompt_tokens=992)
    assert costs_of(LlmDSticky(match_threshold=1.0), whole, hit_tokens=[991, 0]) == [1.0, 1_985.0]
    assert costs_of(LlmDSticky(), request_of(prompt_tokens=9), hit_tokens=[0, 0]) == [9.0, 9.0]


def test_llm_d_sticky_compares_requests_if_its_load_is_requests():
    columns = {"hit_tokens": [800, 992, 0], "running": [3, 2, 0], "waiting": [0, 2, 0]}
    assert costs_of(LlmDSticky(load="requests"), **columns) == [3.0, 4.0, 5.0]
    idle = columns | {"running": 0, "waiting": 0}
    assert costs_of(LlmDSticky(load="requests"), **idle) == [0.0, 0.0, 1.0]


def test_llm_d_sticky_leaves_the_cached_worker_at_its_spill_depth():
    assert leaves_holder_at(LlmDSticky()) is None, "requests do not count"

    def row(queued):
        columns = {"hit_tokens": [850, 0], "queued_prefill_tokens": [queued, 0.0]}
        return pick(np.array(costs_of(LlmDSticky(), **columns)), 0.0)

    assert [row(286_704.0), row(286_705.0)] == [0, 1]  # 18 s at 15,928 tokens/s


@pytest.mark.parametrize("policy", [TrtLlm(), LeastLoad(), LlmD(), LlmD(min_max=True)])
def test_terms_add_up_to_the_costs(policy):
    for seed in range(20):
        fleet, request = wide_fleet(seed, 9), request_of(serial=seed)
        terms = policy.terms(request, fleet, None)
        costs = policy.costs(request, fleet, None)
        np.testing.assert_allclose(sum(terms.values()), costs, atol=2 * AHEAD)


@pytest.mark.parametrize(
    ("policy", "bad"),
    [
        (TrtLlm, {"max_batch_size": 0}),
        (CacheAware, {"match_threshold": 1.5}),
        (CacheAware, {"kv_ceiling": NAN}),
        (CacheAware, {"balance_abs": -1}),
        (CacheAware, {"balance_rel": 0.5}),
        (CacheAware, {"max_tree_tokens": 0.0}),
        (LeastLoad, {"kv_weight_s": -0.1}),
        (LeastLoad, {"tokens_per_s": 0.0}),
        (Aibrix, {"imbalance_gap": -1}),
        (Aibrix, {"deviations": NAN}),
        (RayPrefix, {"imbalance": -1}),
        (RayPrefix, {"match_threshold": 2.0}),
        (LlmDSticky, {"match_threshold": 0.0}),
        (LlmDSticky, {"patience_s": np.inf}),
        (LlmDSticky, {"tokens_per_s": NAN}),
        (LlmDSticky, {"load": "seconds"}),
    ],
)
def test_invalid_parameters_are_rejected(policy, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        policy(**bad)
