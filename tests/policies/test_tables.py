"""Tests of every built-in policy against costs computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from policies import POLICIES
from policies.hybrid import Hybrid
from policies.kv_load import KvLoad
from policies.kv_prefix import KvPrefix
from policies.least_requests import LeastRequests
from policies.load import load
from policies.pick import pick
from policies.power_of_two import PowerOfTwo
from policies.published.llm_d import LlmD
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from tests.policies.fleet import fleet_of, request_of

INF, NAN = np.inf, np.nan


def costs_of(policy, request=None, **columns):
    return policy.costs(request or request_of(), fleet_of(**columns), None).tolist()


def test_round_robin_chooses_the_next_row_each_time():
    rows = [
        costs_of(RoundRobin(), request_of(serial=s), worker_id=[3, 5, 9]).index(0.0)
        for s in range(7)
    ]
    assert rows == [0, 1, 2, 0, 1, 2, 0]
    assert costs_of(RoundRobin(), request_of(serial=4), worker_id=[3, 5, 9]) == [1.0, 0.0, 1.0]


def test_round_robin_spreads_the_requests_of_a_lost_worker():
    lost = [s for s in range(8 * 70) if s % 8 == 3]
    fleet = fleet_of(worker_id=[0, 1, 2, 4, 5, 6, 7])
    rows = [pick(RoundRobin().costs(request_of(serial=s), fleet, None), 0.0) for s in lost]
    assert np.bincount(rows).tolist() == [10] * 7


def test_random_gives_all_workers_equal_costs():
    assert costs_of(Uniform(), hit_tokens=[900, 0], running=[0, 9]) == [0.0, 0.0]


def test_least_requests_counts_running_and_waiting():
    assert costs_of(LeastRequests(), running=[2, 0, 1], waiting=[0, 1, 3]) == [2.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("draw", "costs"),
    [
        (0.00, [4.0, 2.5, INF]),  # pair (0, 1)
        (0.20, [4.0, INF, 2.5]),  # (0, 2)
        (0.40, [4.5, 2.0, INF]),  # (1, 0)
        (0.60, [INF, 2.0, 2.5]),  # (1, 2)
        (0.70, [4.5, INF, 2.0]),  # (2, 0)
        (0.99, [INF, 2.5, 2.0]),  # (2, 1)
    ],
)
def test_power_of_two_compares_the_drawn_pair(draw, costs):
    assert costs_of(PowerOfTwo(), request_of(draw=draw), running=[4, 2, 2]) == costs


def test_power_of_two_favours_no_row_if_all_are_equal():
    fleet, draws = fleet_of(running=[1] * 8), (np.arange(5600) + 0.5) / 5600
    rows = [pick(PowerOfTwo().costs(request_of(draw=d), fleet, None), d) for d in draws]
    assert np.bincount(rows).tolist() == [700] * 8


def test_kv_prefix_never_spills():
    costs = costs_of(KvPrefix(), hit_tokens=[0, 160, 0], running=[0, 10_000, 0])
    assert costs == [0.0, -160.0, 0.0]


def test_kv_load_is_a_share_if_all_capacities_are_known():
    used = {"kv_used_tokens": [50.0, 60.0], "hit_tokens": [900, 0]}
    assert costs_of(KvLoad(), **used, kv_capacity_tokens=[100.0, 400.0]) == [0.5, 0.15]
    assert costs_of(KvLoad(), **used, kv_capacity_tokens=[100.0, NAN]) == [50.0, 60.0]


def test_kv_load_counts_own_requests_before_the_first_report():
    costs = costs_of(
        KvLoad(),
        kv_used_tokens=[NAN, 70.0],
        context_tokens=[30.0, 999.0],
        queued_prefill_tokens=[12.0, 999.0],
    )
    assert costs == [42.0, 70.0]


def test_hybrid_adds_missing_queued_and_decode_work_in_worker_seconds():
    costs = costs_of(
        Hybrid(load_factor=0.5),
        hit_tokens=[600, 0],
        queued_prefill_tokens=[200.0, 400.0],
        running=[3, 0],
        waiting=[1, 2],
        prefill_tokens_per_s=[1_000.0, 2_000.0],
        step_s=[0.01, 0.02],
    )
    # A step is worth 10 and 40 tokens, in the median 25; four and two requests stand there.
    first = (400 + 0.5 * (200 + 4 * 25)) / 1_000
    assert costs == pytest.approx([first, (1_000 + 0.5 * (400 + 2 * 25)) / 2_000])


@pytest.mark.parametrize(
    ("hits", "missing"),
    [
        ([0, 0], [1000.0, 1000.0]),
        ([600, 0], [400.0, 1000.0]),  # one holder: full price
        ([600, 600, 0], [400.0, 400.0, 700.0]),  # two: half
        ([800, 600, 0], [200.0, 400.0, 700.0]),  # 600 of two, 200 of one
        ([0, 600, 200, 600], [400 + 200 / 3 + 400 / 2, 400.0, 600.0, 400.0]),
        ([1000, 1000], [1.0, 1.0]),  # the last token is computed anyway
        ([5000, 0], [1.0, 1000.0]),
    ],
)
def test_missing_tokens_are_priced_by_the_number_of_cached_workers(hits, missing):
    assert fleet_of(hit_tokens=hits).missing_tokens(
        request_of().prompt_tokens
    ).tolist() == pytest.approx(missing)


@pytest.mark.parametrize("holders", [1, 2, 4])
@pytest.mark.parametrize("load_factor", [1.0, 2.0])
def test_hybrid_leaves_the_cached_workers_at_its_spill_depth(holders, load_factor):
    # 6,000 tokens at 10,000/s are 60 steps of 10 ms, shared by the holders, over load_factor.
    depth = 60 / holders / load_factor
    request = request_of(prompt_tokens=6_700)
    hits = [6_000] * holders + [0]

    def goes_to_idle_worker(requests: int) -> bool:
        costs = costs_of(
            Hybrid(load_factor), request, hit_tokens=hits, running=[requests] * holders + [0]
        )
        return pick(np.array(costs), 0.0) == holders

    assert not goes_to_idle_worker(int(depth) - 1)
    assert goes_to_idle_worker(int(depth) + 1)


def test_hybrid_excludes_a_worker_over_a_threshold_while_another_is_below():
    policy = Hybrid(max_requests=4.0, max_queued_tokens=1_000.0, max_kv_fraction=0.5)
    idle = costs_of(Hybrid())[0]
    assert costs_of(policy, running=[4, 0]) == [INF, idle]
    assert costs_of(policy, queued_prefill_tokens=[1_000.0, 0.0]) == [INF, idle]
    kv = {"kv_used_tokens": [50.0, NAN], "kv_capacity_tokens": 100.0}
    assert costs_of(policy, **kv) == [INF, idle]
    assert np.isfinite(costs_of(policy, running=[4, 7])).all()  # all beyond: none excluded


def test_the_threshold_of_a_worker_overrides_that_of_the_policy():
    own = {"max_requests": [8.0, NAN, NAN], "running": [5, 5, 0]}
    assert np.isfinite(costs_of(Hybrid(max_requests=4.0), **own)).tolist() == [True, False, True]
    assert np.isfinite(costs_of(Hybrid(), max_requests=[2.0, NAN], running=[2, 9])).tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"load_factor": -1.0},
        {"load_factor": NAN},
        {"load_factor": INF},
        {"max_requests": 0.0},
        {"max_queued_tokens": NAN},
        {"max_kv_fraction": 1.5},
        {"max_kv_fraction": 0.0},
    ],
)
def test_hybrid_rejects_invalid_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Hybrid(**bad)


def test_every_built_in_policy_loads_under_its_name():
    assert [load(name).name for name in POLICIES] == list(POLICIES)


def test_llm_d_adds_prefix_queue_and_kv_scores():
    columns = {
        "hit_tokens": [600, 0, 300],
        "waiting": [4, 0, 1],
        "kv_used_tokens": [50.0, 0.0, NAN],
        "kv_capacity_tokens": 100.0,
    }
    # prefix 0.6, 0, 0.3; queue 0, 1, 0.75; empty KV 0.5, 1, 1 (never said)
    assert costs_of(LlmD(), **columns) == pytest.approx([-1.7, -2.0, -2.35])
    weighed = LlmD(prefix_weight=3.0, queue_weight=2.0, kv_weight=0.0)
    assert costs_of(weighed, **columns) == pytest.approx([-1.8, -2.0, -2.4])
    # prefix scaled over the workers: 1, 0, 0.5
    assert costs_of(LlmD(min_max=True), **columns) == pytest.approx([-2.5, -2.0, -2.75])


def test_llm_d_gives_equal_workers_equal_costs():
    same = {"hit_tokens": [0, 0], "waiting": [3, 3], "kv_used_tokens": NAN}
    for policy in (LlmD(), LlmD(min_max=True)):
        first, second = costs_of(policy, **same)
        assert first == second


def test_llm_d_never_leaves_a_full_hit_because_of_a_queue():
    """llm-d never leaves a whole hit for a queue, because 2 x 0.999 of the prompt outweighs any
    queue.
    """
    costs = costs_of(LlmD(kv_weight=0.0), hit_tokens=[999, 0], waiting=[10_000, 0])
    assert costs[0] < costs[1]


def test_llm_d_rejects_a_negative_weight():
    with pytest.raises(ValueError, match="queue_weight is -1"):
        LlmD(queue_weight=-1.0)
