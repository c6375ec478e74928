"""Tests of each built-in wrapper against costs computed by hand, and of the load at which it leaves
the cached worker.

A worker of `fleet_of` computes 10,000 tokens/s, and its step takes 10 ms, which is 100 tokens. A
request of `request_of` has 1,000 tokens: with nothing cached it brings 0.1 s of prefill and a step,
0.11 s.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.facts import Dispatched, Tick
from policies.load import load
from policies.wrappers.bounded_load import BoundedLoad
from policies.wrappers.late_binding import LateBinding
from policies.wrappers.progressive import Progressive
from policies.wrappers.thresholds import Thresholds
from tests.policies.fleet import fleet_of, request_of

INF = np.inf
NOW = request_of(now_s=5.0)


def adjusted(wrapper, costs, request=None, state=None, **columns):
    request = request or request_of()
    return wrapper.adjust(np.array(costs), request, fleet_of(**columns), state).tolist()


# --- bounded_load ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queued", "holder_is_open"),
    # 900 cached: it brings 0.02 s. Queue q: q + 0.02 <= 1.25 q / 2 + 0.11, so q <= 0.24 s.
    [(0.0, True), (2_399.0, True), (2_401.0, False), (90_000.0, False)],
)
def test_bounded_load_lets_a_cached_worker_carry_its_saving_above_the_mean(queued, holder_is_open):
    columns = {"hit_tokens": [900, 0], "queued_prefill_tokens": [queued, 0.0]}
    costs = adjusted(BoundedLoad(), [-900.0, 0.0], **columns)
    assert costs == [-900.0 if holder_is_open else INF, 0.0]


def test_the_bound_is_in_seconds_at_the_speed_of_each_worker():
    # Steps of 10 ms are worth 50 and 100 tokens, in the median 75: 15 ms on the slow worker.
    columns = {"prefill_tokens_per_s": [5_000.0, 10_000.0], "queued_prefill_tokens": 2_000.0}
    # Loads 0.4 and 0.2 s, mean 0.3; w_max is the slow one's, 0.2 + 0.015; w 0.215 and 0.1075.
    fleet = fleet_of(**columns)
    terms = BoundedLoad(epsilon=0.0).terms(np.zeros(2), request_of(), fleet, None)
    assert terms["above_s"] == pytest.approx([0.615 - 0.515, 0.3075 - 0.515], abs=1e-6)
    assert adjusted(BoundedLoad(epsilon=0.0), [0.0, 0.0], **columns) == [INF, 0.0]
    assert adjusted(BoundedLoad(epsilon=0.34), [0.0, 0.0], **columns) == [0.0, 0.0]


def test_rows_that_the_policy_excluded_stay_excluded_and_are_not_counted():
    # Of the open rows the second is the fuller: 0.5 + 0.11 > 1.25 * 0.25 + 0.11.
    costs = [3.0, 1.0, INF]
    columns = {"queued_prefill_tokens": [0.0, 5_000.0, 90_000.0]}
    assert adjusted(BoundedLoad(), costs, **columns) == [3.0, INF, INF]
    assert adjusted(BoundedLoad(), [INF, 1.0, INF], **columns) == [INF, 1.0, INF]
    assert adjusted(BoundedLoad(), [INF] * 3, **columns) == [INF] * 3


def spill_depth(spec: str, state=None) -> int:
    """Return how many requests a worker with 900 cached tokens gets, in an idle pool of eight,
    before another worker gets one.
    """
    policy = load(spec)
    for requests in range(200):
        fleet = fleet_of(hit_tokens=[900] + [0] * 7, running=[requests] + [0] * 7)
        if policy.costs(NOW, fleet, state or policy.initial_state()).argmin() != 0:
            return requests
    return 200


def test_wrappers_leave_the_cached_worker_at_their_spill_depths():
    assert spill_depth("kv_prefix") == 200
    # 0.09 s saved / (1 - 1.25 / 8) = 0.1067 s: with ten requests it may have an eleventh.
    assert spill_depth("kv_prefix|bounded_load") == 11
    assert spill_depth("kv_prefix|bounded_load?epsilon=0") == 11  # 0.09 / (7 / 8) = 0.103 s
    assert spill_depth("kv_prefix|bounded_load?epsilon=1") == 13  # 0.09 / (6 / 8) = 0.12: just in
    assert spill_depth("kv_prefix|thresholds?max_requests=4") == 4
    assert spill_depth("kv_prefix|thresholds?spread=3") == 12  # apart by more than 0.11 s
    assert spill_depth("kv_prefix|progressive") == 200  # no rate is known: weight 0
    # 100 requests/s of 100 tokens and a step use a quarter of 80,000 tokens/s: half of `high`.
    quarter, full = (after(Progressive(), [100] * 5, every_s) for every_s in (0.01, 1e-4))
    assert spill_depth("kv_prefix|progressive", (None, quarter)) in (18, 19)  # 900 / (100 * 0.5)
    assert spill_depth("kv_prefix|progressive", (None, full)) == 10
    assert spill_depth("hybrid") == 10


# --- thresholds -----------------------------------------------------------------------------


def test_fixed_thresholds_apply_to_any_policy_and_workers_may_override_them():
    wrapper = Thresholds(max_requests=4)
    assert adjusted(wrapper, [-900.0, 0.0], running=[4, 3]) == [INF, 0.0]
    assert adjusted(wrapper, [-900.0, 0.0], running=[3, 3]) == [-900.0, 0.0]
    own = {"max_requests": [9.0, 3.0]}
    assert adjusted(wrapper, [-900.0, 0.0], running=[4, 3], **own) == [-900.0, INF]
    assert adjusted(Thresholds(), [-900.0, 0.0], running=[4, 3], **own) == [-900.0, INF]
    assert adjusted(wrapper, [-900.0, 0.0], running=[4, 9]) == [-900.0, 0.0], "all at theirs"
    queued = {"queued_prefill_tokens": [50.0, 49.0]}
    assert adjusted(Thresholds(max_queued_tokens=50.0), [0.0, 0.0], **queued) == [INF, 0.0]
    assert adjusted(Thresholds(max_kv_fraction=0.5), [0.0, 0.0]) == [0.0, 0.0], "KV use is unknown"


def test_thresholds_never_exclude_the_last_worker_of_the_policy():
    # The only row the policy leaves open is full: being full beats being held for ever.
    assert adjusted(Thresholds(max_requests=4), [INF, 1.0], running=[0, 9]) == [INF, 1.0]
    shut = [1.0, 1.0, INF]
    assert adjusted(Thresholds(max_requests=4), shut, running=[9, 9, 0]) == shut


@pytest.mark.parametrize(
    ("queued", "apart"),
    [
        ([0.0], []),  # a pool of one
        ([500.0] * 4, []),  # equal loads
        ([0.0, 1_050.0], []),  # apart by less than one request
        ([0.0, 1_200.0], [1]),  # of two the fuller
        ([0.0, 0.0, 90_000.0], [2]),
        ([0.0, 0.0, 90_000.0, 90_000.0], [2, 3]),
        ([0.0, 9_000.0, 9_000.0, 9_000.0], []),  # most are: they are the rule
        # Median 0.4 s, its deviations 0.4 0.2 0 0.2 1.6: sigma 0.3, two of them 0.6.
        ([0.0, 2_000.0, 4_000.0, 6_000.0, 9_500.0], []),
        ([0.0, 2_000.0, 4_000.0, 6_000.0, 20_000.0], [4]),
    ],
)
def test_workers_with_load_far_above_the_median_are_excluded(queued, apart):
    costs = adjusted(Thresholds(spread=2.0), [1.0] * len(queued), queued_prefill_tokens=queued)
    assert [row for row, cost in enumerate(costs) if cost == INF] == apart


def test_a_slow_worker_is_excluded_at_a_smaller_queue():
    columns = {"prefill_tokens_per_s": [10_000.0, 10_000.0, 2_000.0]}
    alike = adjusted(Thresholds(spread=2.0), [1.0] * 3, queued_prefill_tokens=4_000.0, **columns)
    assert alike == [1.0, 1.0, INF]  # 0.4, 0.4 and 2 s; there one request brings 0.55 s


# --- late_binding ---------------------------------------------------------------------------


def late(held_s=0.0, costs=(1.0, 0.0), request=None, **changes):
    """Return the costs of a request for which one worker has 900 of 1,000 tokens cached and queued
    tokens, while the policy prefers the other worker.
    """
    columns = {"hit_tokens": [900, 0], "queued_prefill_tokens": [500.0, 0.0]} | changes
    held_request = replace(request or request_of(), held_s=held_s)
    return adjusted(LateBinding(max_wait_s=0.4), list(costs), held_request, **columns)


def test_late_binding_holds_while_the_cached_worker_is_worth_the_wait():
    # At the holder in 0.05 s; elsewhere 0.1 s of prefill, at the holder 0.01: 0.09 s to gain.
    assert late() == [INF, INF]
    assert late(queued_prefill_tokens=[899.0, 0.0]) == [INF, INF]
    assert late(queued_prefill_tokens=[901.0, 0.0]) == [1.0, 0.0], "the wait costs as much"
    assert late(queued_prefill_tokens=[901.0, 500.0]) == [INF, INF], "elsewhere they wait, too"
    assert late(running=[5, 0]) == [1.0, 0.0], "five steps more: 0.1 s"


def test_late_binding_holds_less_the_longer_a_request_has_waited():
    assert late(held_s=0.030) == [INF, INF]  # 0.03 + 0.05 < 0.09 * 0.925
    assert late(held_s=0.040) == [1.0, 0.0]  # 0.04 + 0.05 > 0.09 * 0.9
    assert late(held_s=0.4) == late(held_s=9.0) == [1.0, 0.0]


def test_a_held_request_goes_to_the_cached_worker_once_that_is_free():
    free = {"queued_prefill_tokens": [100.0, 0.0]}  # a step's worth
    assert late(held_s=0.02, **free) == [1.0, INF]
    assert late(**free) == [1.0, 0.0], "a request that has not waited follows the policy"
    assert late(held_s=0.02, costs=(INF, 0.0), **free) == [INF, 0.0], "the policy shut it"
    assert late(costs=(INF, 0.0)) == [INF, INF], "which its queue may have caused"


@pytest.mark.parametrize(
    "changes",
    [
        {"hit_tokens": [0, 0]},
        {"hit_tokens": [900, 900]},
        {"costs": (0.0, 1.0)},
        {"costs": (0.0, 0.0)},
        {"hits_unknown": [True, False]},
        {"hits_unknown": [False, True]},
        {"load_age_s": 5.1, "event_age_s": 5.1},
        {"load_age_s": INF, "event_age_s": INF},
    ],
)
def test_late_binding_never_holds_without_a_benefit(changes):
    assert late(**changes) == list(changes.get("costs", (1.0, 0.0)))


def test_a_worker_with_recent_events_or_load_reports_is_alive():
    assert late(load_age_s=INF, event_age_s=1.0) == late(load_age_s=1.0, event_age_s=INF)
    assert late(load_age_s=INF, event_age_s=1.0) == [INF, INF]


# --- progressive ----------------------------------------------------------------------------


def after(wrapper, uncached, every_s):
    """Return the wrapper's state after dispatches that lacked the given numbers of tokens, one
    every `every_s` seconds.
    """
    state, chain = wrapper.initial_state(), np.zeros(0, dtype=np.uint64)
    for number, tokens in enumerate(uncached):
        fact = Dispatched(5.0 + number * every_s, number, 0, 0, tokens, chain)
        state = wrapper.observe(Tick(fact.now_s), wrapper.observe(fact, state))
    return state


def test_progressive_learns_the_tokens_and_the_rate_of_requests():
    state = after(Progressive(), (100, 300, 200), 0.5)
    assert state == (3, pytest.approx(200.0), pytest.approx(0.5), 6.0)
    state = after(Progressive(), (100, *[700] * 1_000), 0.25)
    assert state[:3] == (64, pytest.approx(700.0, abs=0.01), pytest.approx(0.25))


@pytest.mark.parametrize(
    ("gap_s", "since_s", "weight"),
    [
        (1 / 5, 0.0, 0.0),
        (1 / 10, 0.0, 0.25),
        (1 / 25, 0.0, 1.0),
        (0.0, 0.0, 1.0),
        (1 / 25, 1 / 10, 0.25),  # a pause: there is room
        (1 / 25, 60.0, 0.0),
    ],
)
def test_the_weight_of_progressive_follows_the_requested_capacity_share(gap_s, since_s, weight):
    # 300 tokens and a step of 100, of two workers' 20,000 tokens/s: 2 % a request per second.
    fleet = fleet_of(worker_id=[0, 1])
    wrapper = Progressive(low=0.1, high=0.5, load_factor=2.0)
    state = after(wrapper, [300] * 9, gap_s)
    actual = wrapper.weight(state.last_s + since_s, fleet, 100.0, state)
    assert actual == pytest.approx(2.0 * weight, abs=1e-9)
    assert wrapper.weight(5.0, fleet, 100.0, after(wrapper, [300], 1.0)) == 0.0, "one tells no rate"


def test_a_second_of_load_costs_as_much_as_a_second_of_missing_prefill():
    # Weight 1; loads 0.05 and 0 s; 600 tokens of 0.06 s span 600 units: 10,000 a second.
    columns = {
        "hit_tokens": [600, 0],
        "queued_prefill_tokens": [500.0, 0.0],
    }
    state = after(Progressive(), [100] * 5, 1e-4)
    assert adjusted(Progressive(), [-600.0, 0.0], NOW, state, **columns) == [-100.0, 0.0]
    assert adjusted(Progressive(), [-1.2, 0.0], NOW, state, **columns) == pytest.approx([-0.2, 0])
    alike = columns | {"hit_tokens": [600, 600]}
    assert adjusted(Progressive(), [2.0, 2.0], NOW, state, **alike) == [2.05, 2.0]
    # Both hold the same: 1 unit between their costs is as much as the 0.05 s between their loads.
    assert adjusted(Progressive(), [0.0, 1.0], NOW, state, **alike) == [1.0, 1.0]
    assert adjusted(Progressive(), [-600.0, INF], NOW, state, **columns) == [-600.0, INF]


def test_progressive_with_weight_1_turns_affinity_into_hybrid():
    fleet = fleet_of(
        hit_tokens=[640, 640, 160, 0],
        queued_prefill_tokens=[900.0, 0.0, 40.0, 0.0],
        running=[3, 9, 1, 0],
    )
    hybrid = load("hybrid").costs(request_of(), fleet, None)
    policy = load("hybrid?load_factor=0|progressive")
    state = (None, after(Progressive(), [100] * 5, 1e-4))
    costs = policy.costs(NOW, fleet, state)
    assert costs - costs.min() == pytest.approx(hybrid - hybrid.min())
