"""Tests of what the policy warmset promises for all its constants: which workers are excluded,
which never are, and what it refuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import FleetView
from policies.load import PolicyError, load
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of

WARMSET = load("warmset")
AMOUNT = st.one_of(st.just(0.0), st.floats(0.0, 1e7))
STANDINGS = st.sampled_from(("new", "cold", "warm"))
FULL = {"kv_capacity_tokens": 10_000.0, "working_set_tokens": 10_000.0, "working_set_s": 60.0}


@pytest.mark.parametrize(
    "parameters",
    [
        *(
            "gate=0",
            "gate=-1",
            "gate=nan",
            "gate=inf",
            "gate=x",
            "stay=0.9",
            "stay=nan",
            "stay=inf",
        ),
        *("running=-0.1", "running=1.1", "running=nan"),
    ],
)
def test_a_parameter_out_of_range_is_rejected(parameters: str) -> None:
    with pytest.raises(PolicyError, match=parameters.partition("=")[0]):
        load(f"warmset?{parameters}")


@st.composite
def fleets(draw: st.DrawFn) -> FleetView:
    n = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=n, max_size=n))

    return fleet_of(
        worker_id=list(range(n)),
        hit_tokens=draw(st.lists(st.integers(0, 2_000), min_size=n, max_size=n)),
        hits_unknown=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        holds_trunk=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        running=draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)),
        waiting=draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)),
        queued_prefill_tokens=column(AMOUNT),
        kv_capacity_tokens=column(st.one_of(st.just(float("nan")), st.floats(1.0, 1e8))),
        working_set_tokens=column(AMOUNT),
        working_set_s=column(st.floats(0.0, 1e5)),
        prefill_tokens_per_s=column(st.floats(1.0, 1e6)),
        pair_tokens=draw(st.floats(0.0, 1e-2)),
        cycle_s=draw(st.floats(0.0, 1e4)),
        turnover_per_s=draw(st.floats(0.0, 1e3)),
        hot_trunk_tokens=draw(st.integers(0, 2_000)),
        copies_missing=draw(st.integers(-6, 6)),
    )


@settings(max_examples=examples(100))
@given(
    fleet=fleets(),
    standing=STANDINGS,
    home_id=st.integers(-1, 7),
    prompt_tokens=st.integers(2_000, 100_000),
    trunk_tokens=st.integers(0, 2_000),
)
def test_costs_are_valid_for_any_session_data(
    fleet: FleetView, standing: str, home_id: int, prompt_tokens: int, trunk_tokens: int
) -> None:
    request = request_of(
        prompt_tokens=prompt_tokens, standing=standing, home_id=home_id, trunk_tokens=trunk_tokens
    )
    costs = WARMSET.costs(request, fleet, None)
    assert costs.shape == (len(fleet),)
    assert not np.isnan(costs).any()
    assert (costs > -np.inf).all()
    if standing == "warm":
        assert np.isfinite(costs[fleet.worker_id == home_id]).all(), "warm sessions may go home"
    empty = fleet.working_set_tokens == 0.0
    if standing != "warm":
        assert np.isfinite(costs[empty]).all(), "an empty worker takes any session"
    if np.isnan(fleet.kv_capacity_tokens).all():
        assert np.isfinite(costs).all(), "unknown capacities exclude no worker"


@pytest.mark.parametrize("standing", ["new", "cold"])
def test_a_session_waits_while_every_cache_is_in_use_and_waiting_pays(standing: str) -> None:
    request = request_of(standing=standing)
    full = fleet_of(worker_id=[0, 1], cycle_s=10.0, **FULL)
    assert np.isinf(WARMSET.costs(request, full, None)).all()
    room = fleet_of(worker_id=[0, 1], cycle_s=10.0, **FULL | {"working_set_tokens": [1e4, 8e3]})
    assert np.isinf(WARMSET.costs(request, room, None)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("held_s", "may_wait_s", "opens"), [(9.9, 1.0, False), (10.1, 1.0, True), (0.1, 0.0, True)]
)
def test_no_request_is_held_long_while_a_worker_is_idle(
    held_s: float, may_wait_s: float, opens: bool
) -> None:
    """No request is held for long while another worker is idle: here for a hundred times the 0.1 s
    of its prefill, or until it would be refused; then the idle worker takes it.
    """
    full = fleet_of(worker_id=[0, 1], cycle_s=10.0, running=[3, 0], **FULL)
    request = request_of(standing="new", held_s=held_s, may_wait_s=may_wait_s)
    assert np.isfinite(WARMSET.costs(request, full, None)).tolist() == [False, opens]


def test_the_gate_is_open_if_running_cold_is_affordable() -> None:
    cheap = fleet_of(worker_id=[0, 1], cycle_s=100.0, **FULL | {"working_set_s": 10.0})
    assert np.isfinite(WARMSET.costs(request_of(standing="new"), cheap, None)).all()


def test_the_gate_is_open_until_a_session_has_returned() -> None:
    """Requests are not held as long as no session has come back, as in a router that has just
    started in front of caches full of unknown blocks.
    """
    full = fleet_of(worker_id=[0, 1], cycle_s=0.0, **FULL)
    assert np.isfinite(WARMSET.costs(request_of(standing="new"), full, None)).all()


def test_a_wider_gate_admits_more_sessions() -> None:
    full = fleet_of(worker_id=[0, 1], cycle_s=10.0, **FULL)
    request = request_of(standing="new")
    assert np.isfinite(load("warmset?gate=1.2").costs(request, full, None)).all()


def test_a_warm_session_goes_to_its_full_home_worker_and_moving_costs_more() -> None:
    full = fleet_of(worker_id=[0, 1], hit_tokens=[900, 0], cycle_s=10.0, **FULL)
    request = request_of(standing="warm", home_id=0, return_chance=1.0)
    home_s, away_s = WARMSET.costs(request, full, None)
    pushed_s = 1_000 * 60.0 / 10_000
    assert home_s == pytest.approx(0.01)
    assert away_s == pytest.approx((0.1 + pushed_s) * 4.0)


def test_a_pool_of_one_holds_a_session_that_does_not_fit() -> None:
    full = fleet_of(worker_id=[3], cycle_s=10.0, **FULL)
    assert np.isinf(WARMSET.costs(request_of(standing="new"), full, None)).all()
    empty = fleet_of(worker_id=[3], cycle_s=10.0, kv_capacity_tokens=500.0)
    assert np.isfinite(WARMSET.costs(request_of(standing="new"), empty, None)).all()


def test_a_cached_trunk_needs_no_further_room() -> None:
    columns = FULL | {"working_set_tokens": 9_500.0, "holds_trunk": [True, False]}
    fleet = fleet_of(worker_id=[0, 1], cycle_s=10.0, **columns)
    request = request_of(standing="new", trunk_tokens=800)
    assert np.isfinite(WARMSET.costs(request, fleet, None)).tolist() == [True, False]


@pytest.mark.parametrize("standing", ["new", "cold"])
def test_a_mostly_cached_prompt_goes_to_its_cache_even_if_that_is_full(standing: str) -> None:
    """A request whose prompt is mostly in one worker's cache goes there however full that cache is,
    like a second question on a long document.
    """
    there = fleet_of(worker_id=[0, 1, 2], hit_tokens=[600, 500, 0], cycle_s=10.0, **FULL)
    request = request_of(standing=standing, prompt_tokens=1_000)
    assert np.isfinite(WARMSET.costs(request, there, None)).tolist() == [True, False, False]
    shared = fleet_of(worker_id=[0, 1], hit_tokens=[600, 850], cycle_s=10.0, **FULL)
    request = request_of(standing=standing, prompt_tokens=1_000, trunk_tokens=600)
    assert np.isfinite(WARMSET.costs(request, shared, None)).tolist() == [False, True]


def test_an_idle_pool_fills_its_empty_caches() -> None:
    """An idle pool fills its empty caches: a prefix that all prompts share does not keep all
    requests at the first worker.
    """
    columns = {"kv_capacity_tokens": 10_000.0, "hit_tokens": [64, 0]}
    request = request_of(standing="new")
    full = fleet_of(worker_id=[0, 1], cached_tokens=[10_000.0, 9_000.0], **columns)
    both = fleet_of(worker_id=[0, 1], cached_tokens=10_000.0, **columns)
    unknown = fleet_of(worker_id=[0, 1], **columns)
    for fleet, best in ((full, 1), (both, 0), (unknown, 0)):
        assert int(np.argmin(WARMSET.costs(request, fleet, None))) == best


def test_a_trunk_with_missing_copies_is_not_charged_to_the_request() -> None:
    """A shared prefix that more workers should hold is not charged to a request that brings it. An
    idle worker lacks the prefix; another one holds it and has 30 other requests.
    """
    columns = {"hit_tokens": [6_000, 0], "running": [30, 0], "hot_trunk_tokens": 6_000}
    request = request_of(prompt_tokens=6_400, standing="new")
    for missing, best in ((0, 0), (1, 1)):
        fleet = fleet_of(worker_id=[0, 1], copies_missing=missing, **columns)
        terms = WARMSET.terms(request, fleet, None)
        assert int(np.argmin(WARMSET.costs(request, fleet, None))) == best
        assert terms["prefill_s"].tolist() == pytest.approx([0.04, 0.04 if missing else 0.64])
        # The running requests wait for all of it.
        assert terms["running_s"][0] == pytest.approx(3.0 * (0.04 + 0.005))


def test_unknown_hits_count_as_their_lower_bound() -> None:
    request = request_of(standing="warm", home_id=0)
    known, unknown = (
        fleet_of(worker_id=[0, 1], hit_tokens=[500, 0], hits_unknown=lost)
        for lost in ([False, False], [True, True])
    )
    costs = [WARMSET.costs(request, fleet, None).tolist() for fleet in (known, unknown)]
    assert costs[0] == costs[1]


# Two workers: one is nearly full, and the other has hardly any room left.
EXAMPLE = {
    "worker_id": [0, 1],
    "holds_trunk": True,
    "kv_capacity_tokens": 100_000.0,
    "working_set_tokens": [80_000.0, 95_000.0],
    "working_set_s": [8.0, 9.5],
    "queued_prefill_tokens": [6_000.0, 0.0],
    "prefill_tokens_per_s": 20_000.0,
    "running": [3, 8],
    "step_s": 0.02,
    "pair_tokens": 4e-5,
    "cycle_s": 6.0,
    "turnover_per_s": 0.5,
}
PROMPT = {"prompt_tokens": 20_000, "trunk_tokens": 10_000, "return_chance": 0.9}


def test_a_new_session_goes_to_the_worker_with_room() -> None:
    request = request_of(standing="new", **PROMPT)
    costs = WARMSET.costs(request, fleet_of(hit_tokens=[10_000, 10_000], **EXAMPLE), None)
    delay_s, place_s = 3 * 0.8 * 2 * 0.5 * (0.3 + 0.4), 0.8 * 0.9 * 0.9
    assert costs.tolist() == [pytest.approx(0.3 + 0.8 + delay_s + 0.243 + place_s), np.inf]


def test_a_warm_session_stays_at_its_home_worker_even_if_that_is_full() -> None:
    request = request_of(standing="warm", home_id=1, **PROMPT)
    costs = WARMSET.costs(request, fleet_of(hit_tokens=[10_000, 18_000], **EXAMPLE), None)
    # At the other worker the trunk is cached, and the 10,000 private tokens evict nothing.
    away_s = 0.3 + 0.8 + 3 * 0.8 * 2 * 0.5 * (0.3 + 0.4) + 0.243
    home_s = 0.176 + 8 * 0.176 * 2 * 0.5 * 0.088 + 0.8 * 0.186
    assert costs.tolist() == pytest.approx([away_s * 4**0.9, home_s])


@pytest.mark.parametrize(
    ("changes", "held_s", "open_rows"),
    [
        ({"working_set_tokens": 95_000.0, "working_set_s": 9.5}, 0.0, [False, False]),
        # The worker could compute all of it again within 0.9 of a turn: 4.5 + 0.8 s of 6 s.
        ({"working_set_tokens": 95_000.0, "working_set_s": [9.5, 4.5]}, 0.0, [False, True]),
        # Holding does not pay: 1.2 * 0.9 * 100,000 tokens of 9.5 s / 95,000 are 10.8 s.
        (
            {"working_set_tokens": 95_000.0, "working_set_s": 9.5, "cycle_s": 10.9},
            0.0,
            [True, True],
        ),
        ({"working_set_tokens": [99_000.0, 0.0], "working_set_s": 9.9}, 0.0, [False, True]),
        # If one worker has room, no wait opens the other.
        ({"working_set_tokens": [80_000.0, 91_000.0]}, 5.1, [True, False]),
    ],
)
def test_new_sessions_are_admitted_only_at_workers_with_room(changes, held_s, open_rows) -> None:
    request = request_of(standing="new", held_s=held_s, **PROMPT)
    fleet = fleet_of(hit_tokens=[10_000, 10_000], **(EXAMPLE | changes))
    assert np.isfinite(WARMSET.costs(request, fleet, None)).tolist() == open_rows


def test_a_session_that_fits_nowhere_takes_the_best_worker_after_waiting() -> None:
    crowded = EXAMPLE | {
        "working_set_tokens": [95_000.0, 96_000.0, 20_000.0],
        "working_set_s": 30.0,
        "worker_id": [0, 1, 2],
        "queued_prefill_tokens": 0.0,
        "running": 0,
    }
    big = {"prompt_tokens": 95_000, "trunk_tokens": 10_000, "standing": "new"}
    fleet = fleet_of(hit_tokens=[10_000] * 3, **crowded)
    for held_s, open_rows in ((4.0, [False] * 3), (6.0, [False] * 3)):
        costs = WARMSET.costs(request_of(held_s=held_s, **big), fleet, None)
        assert np.isfinite(costs).tolist() == open_rows  # 211,000 + 85,000 are beyond 270,000
    roomy = fleet_of(
        hit_tokens=[10_000] * 3,
        **(crowded | {"working_set_tokens": [60_000.0, 70_000.0, 30_000.0]}),
    )
    for held_s, open_rows in ((4.0, [False] * 3), (6.0, [False, False, True])):
        costs = WARMSET.costs(request_of(held_s=held_s, **big), roomy, None)
        assert np.isfinite(costs).tolist() == open_rows


def test_a_session_larger_than_any_cache_does_not_wait_forever() -> None:
    full = EXAMPLE | {"working_set_tokens": [95_000.0, 97_000.0], "working_set_s": 60.0}
    fleet = fleet_of(hit_tokens=[10_000, 10_000], **full)
    for held_s, open_rows in ((0.0, [False, False]), (5.1, [True, False])):
        giant = request_of(
            prompt_tokens=150_000, trunk_tokens=10_000, standing="new", held_s=held_s
        )
        costs = WARMSET.costs(giant, fleet, None)
        assert np.isfinite(costs).tolist() == open_rows


@pytest.mark.parametrize(("standing", "shut"), [("cold", False), ("new", True)])
def test_a_begun_session_waits_at_most_four_times_its_prefill_time(
    standing: str, shut: bool
) -> None:
    full = EXAMPLE | {"working_set_tokens": [97_000.0, 95_000.0], "working_set_s": 60.0}
    fleet = fleet_of(hit_tokens=[10_000, 10_000], **full | {"prefill_tokens_per_s": 10_000.0})
    # Its 10,000 tokens after 10,000 take 1.6 s.
    for held_s, second in ((6.3, True), (6.5, shut)):
        request = request_of(standing=standing, held_s=held_s, **PROMPT)
        costs = WARMSET.costs(request, fleet, None)
        assert np.isinf(costs).tolist() == [True, second]
        beyond = fleet.with_columns(working_set_tokens=np.array([107_000.0, 106_000.0]))
        assert np.isinf(WARMSET.costs(request, beyond, None)).all()


def test_a_worker_of_unknown_capacity_counts_as_large_as_the_other_workers() -> None:
    columns = EXAMPLE | {
        "working_set_tokens": 95_000.0,
        "working_set_s": 9.5,
        "worker_id": [0, 1, 2],
    }
    columns |= {"queued_prefill_tokens": 0.0, "running": 0}
    columns["kv_capacity_tokens"] = [100_000.0, float("nan"), 100_000.0]
    fleet = fleet_of(hit_tokens=[10_000] * 3, **columns)
    assert np.isinf(WARMSET.costs(request_of(standing="new", **PROMPT), fleet, None)).all()


@pytest.mark.parametrize(("queued", "priced"), [(6_000.0, False), ([6_000.0, 0.0], True)])
def test_memory_has_a_price_if_cached_blocks_last_a_turn(queued: object, priced: bool) -> None:
    """Cache memory has a price where caches last: filling a cache takes 8.1 s on average, which is
    less than a turn, and more than half of one.
    """
    columns = EXAMPLE | {
        "cycle_s": 15.0,
        "working_set_tokens": [150_000.0, 99_000.0],
        "queued_prefill_tokens": queued,
    }
    fleet = fleet_of(hit_tokens=[10_000, 10_000], **columns)
    for standing in ("new", "cold", "warm"):
        request = request_of(standing=standing, home_id=1, **PROMPT)
        terms = WARMSET.terms(request, fleet, None)
        assert terms["pushed_out_s"].any() == priced
        assert terms["place_s"].any() == priced
        assert not terms["over_tokens"].any(), "holding pays nowhere, whatever the load"


def memory_wait_s(turnover_per_s: float = 0.5, **columns: Any) -> list[float]:
    """Return the seconds that a prompt of 20,000 tokens, half of it a shared prefix, waits for
    memory at each worker.
    """
    fleet = fleet_of(**EXAMPLE | columns | {"turnover_per_s": turnover_per_s})
    terms = WARMSET.terms(request_of(standing="new", **PROMPT), fleet, None)
    return terms["memory_wait_s"].tolist()


def test_a_request_waits_for_answers_to_free_the_memory_that_it_lacks() -> None:
    """A request waits until enough answers end to free the memory that it lacks: three answers of
    32,000 tokens run, 1.5 of them end per second, and 6,000 tokens are lacking.
    """
    used = {"kv_used_tokens": [96_000.0, 80_000.0]}
    assert memory_wait_s(**used) == pytest.approx([1 / 1.5, 0.0])
    assert memory_wait_s(hit_tokens=19_999, **used) == pytest.approx([1 / 1.5, 0.0]), (
        "cached tokens need memory, too"
    )
    assert memory_wait_s(0.0, **used) == [0.0, 0.0], "the end of answers is unknown"
    idle = {"running": [0, 8], "kv_used_tokens": [96_000.0, 1e9]}
    assert memory_wait_s(**idle) == [0.0, 2.0], "no answer to wait for; wait for all answers"


def test_waiting_prompts_take_the_memory_of_a_worker_first() -> None:
    """Prompts that already wait at a worker take its memory first. With the shared prefix counted
    once, 3 requests want 52,000 + 64,000 - 2 x 10,000 = 96,000 tokens.
    """
    columns = {
        "running": [2, 8],
        "waiting": [1, 0],
        "context_tokens": 52_000.0,
        "waiting_prompt_tokens": [64_000, 0],
    }
    assert memory_wait_s(kv_used_tokens=40_000.0, **columns) == pytest.approx([1 / 1.5, 0.0])
    assert memory_wait_s(kv_used_tokens=np.nan, **columns) == pytest.approx([1 / 1.5, 0.0])
    roomy = columns | {"kv_capacity_tokens": 106_000.0}
    assert memory_wait_s(kv_used_tokens=40_000.0, **roomy) == [0.0, 0.0]
