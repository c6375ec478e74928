"""Tests of published rules for agents, against costs computed by hand; their memory is compared
with plain implementations.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Dispatched, Finish, WorkerChange
from policies.pick import pick
from policies.published.dynamo_load_guard import DynamoLoadGuard
from policies.published.dynamo_subagent_group import DynamoSubagentGroup
from policies.published.dynamo_two_tier import DynamoTwoTier
from policies.published.homes import SiblingHomes
from policies.published.smg_expected_wait import SmgExpectedWait
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of
from tests.policies.published.holder import costs_of, leaves_holder_at

NAN = np.nan
NO_CHAIN = np.zeros(0, dtype=np.uint64)


def dispatched(worker_id, session=None, parent=None, now_s=0.0, tenant=None):
    return Dispatched(
        now_s, 1, worker_id, 0, 9, NO_CHAIN, session=session, tenant=tenant, parent=parent
    )


def after(policy, *facts):
    state = policy.initial_state()
    for fact in facts:
        state = policy.observe(fact, state)
    return state


# --- two tiers ------------------------------------------------------------------------------------


def test_two_tier_takes_the_least_loaded_holder_of_the_longest_match():
    ten_blocks = request_of(prompt_tokens=160)
    columns = {"hit_tokens": [96, 0, 96], "running": [3, 0, 2], "waiting": [1, 0, 1]}
    # Six of ten blocks; four and three requests.
    assert costs_of(DynamoTwoTier(), ten_blocks, **columns) == [1.0, 2.0, 0.0]


def test_two_tier_follows_the_cache_only_above_the_match_threshold():
    ten_blocks = request_of(prompt_tokens=160)
    columns = {"hit_tokens": [0, 80], "running": [0, 4]}
    assert costs_of(DynamoTwoTier(), ten_blocks, **columns) == [0.0, 4.0]
    assert costs_of(DynamoTwoTier(match_threshold=0.4), ten_blocks, **columns) == [1.0, 0.0]
    whole = costs_of(
        DynamoTwoTier(match_threshold=0.95), ten_blocks, hit_tokens=[0, 159], running=[0, 4]
    )
    assert whole == [1.0, 0.0], "ten of ten blocks, though the last token is computed"
    blockless = request_of(prompt_tokens=9)
    assert costs_of(DynamoTwoTier(), blockless, **columns | {"hit_tokens": 0}) == [0.0, 4.0]


@pytest.mark.parametrize(
    ("loads", "costs"),
    [
        ([0, 32], [1.0, 0.0]),
        ([0, 33], [0.0, 33.0]),
        ([640, 704], [1.0, 0.0]),  # 64 apart, and 1.1 times
        ([640, 705], [640.0, 705.0]),
    ],
)
def test_two_tier_balances_load_if_loads_differ_by_both_measures(loads, costs):
    assert costs_of(DynamoTwoTier(), hit_tokens=[0, 992], running=loads) == costs


def test_two_tier_leaves_the_cached_worker_at_its_spill_depth():
    assert leaves_holder_at(DynamoTwoTier()) == 33
    assert leaves_holder_at(DynamoTwoTier(balance_abs=5)) == 6


# --- load guard -----------------------------------------------------------------------------------


def test_load_guard_keeps_the_bound_worker_up_to_its_limit():
    policy, request = DynamoLoadGuard(), request_of(session="s")
    state = after(policy, dispatched(1, "s"))
    assert costs_of(policy, request, state, running=[0, 32, 9]) == [0.0, -1.0, 9.0]
    assert costs_of(policy, request, state, running=[0, 20, 9], waiting=[0, 13, 0]) == [0, 33, 9]
    other = request_of(session="t")
    assert costs_of(policy, other, state, running=[5, 3, 9]) == [5.0, 3.0, 9.0]


def test_load_guard_moves_only_to_a_worker_with_two_requests_fewer():
    policy, request = DynamoLoadGuard(), request_of(session="s")
    state = after(policy, dispatched(1, "s"))
    assert costs_of(policy, request, state, running=[32, 33, 40]) == [32.0, -1.0, 40.0]
    assert costs_of(policy, request, state, running=[31, 33, 40]) == [31.0, 33.0, 40.0]
    firmer = DynamoLoadGuard(move_margin=3)
    assert costs_of(firmer, request, state, running=[31, 33, 40]) == [31.0, -1.0, 40.0]


def test_load_guard_binds_siblings_together_or_each_session_alone():
    facts = dispatched(2, "child 1", "main"), dispatched(0, "main")
    sibling = request_of(session="child 2", parent="main")
    main = request_of(session="main")
    loads = {"running": [4, 0, 4]}
    together, alone = DynamoLoadGuard(), DynamoLoadGuard(binding="session")
    assert costs_of(together, sibling, after(together, *facts), **loads) == [4.0, 0.0, -1.0]
    assert costs_of(together, main, after(together, *facts), **loads) == [-1.0, 0.0, 4.0]
    assert costs_of(alone, sibling, after(alone, *facts), **loads) == [4.0, 0.0, 4.0]
    again = request_of(session="child 1", parent="main")
    assert costs_of(alone, again, after(alone, *facts), **loads) == [4.0, 0.0, -1.0]


def test_load_guard_compares_requests_if_the_bound_worker_is_not_eligible():
    policy = DynamoLoadGuard()
    state = after(policy, dispatched(1, "s"))
    request = request_of(session="s")
    assert costs_of(policy, request, state, worker_id=[0, 2], running=[3, 1]) == [3.0, 1.0]
    assert costs_of(policy, request, state, worker_id=[1], running=[99]) == [-1.0]


# --- groups of sub-agents -------------------------------------------------------------------------


def test_subagents_share_a_worker_other_than_that_of_their_parent():
    policy = DynamoSubagentGroup()
    state = after(policy, dispatched(0, "main"))
    first = request_of(session="child 1", parent="main")
    assert costs_of(policy, first, state, running=[1, 0]) == [1.0, 0.0]
    state = policy.observe(dispatched(1, "child 1", "main"), state)
    second = request_of(session="child 2", parent="main")
    assert costs_of(policy, second, state, running=[0, 9]) == [0.0, -1.0]
    assert costs_of(policy, request_of(session="main"), state, running=[9, 0]) == [-1.0, 0.0]


def test_a_group_leaves_a_full_worker_for_any_less_loaded_worker():
    policy = DynamoSubagentGroup()
    state = after(policy, dispatched(1, "child 1", "main"))
    child = request_of(session="child 1", parent="main")
    assert costs_of(policy, child, state, running=[0, 32]) == [0.0, -1.0]
    assert costs_of(policy, child, state, running=[33, 33]) == [33.0, -1.0]
    assert costs_of(policy, child, state, running=[32, 33]) == [32.0, 33.0]
    state = policy.observe(dispatched(0, "child 1", "main"), state)
    assert costs_of(policy, child, state, running=[8, 0]) == [-1.0, 0.0]


def test_an_idle_group_expires_and_a_session_does_not():
    policy = DynamoSubagentGroup()
    state = after(policy, dispatched(1, "main", now_s=5.0), dispatched(1, "child", "main", 10.0))
    loads = {"running": [0, 3]}

    def costs(now_s, **who):
        return costs_of(policy, request_of(now_s=now_s, **who), state, **loads)

    assert costs(309.9, session="child", parent="main") == [0.0, -1.0]
    assert costs(310.0, session="child", parent="main") == [0.0, 3.0]
    assert costs(10_000.0, session="main") == [0.0, -1.0]


# --- the memory of both ---------------------------------------------------------------------------

dispatches = st.lists(
    st.tuples(
        st.integers(0, 3),  # worker
        st.sampled_from(["a", "b", "c", None]),  # session
        st.sampled_from(["a", "b", None]),  # parent
        st.sampled_from(["t", None]),  # tenant
        st.integers(0, 4),  # seconds after the fact before
    ),
    max_size=30,
)


@settings(max_examples=examples(200))
@given(dispatches=dispatches, bound=st.integers(1, 4), idle_s=st.sampled_from([inf, 3.0, 1.0]))
def test_siblings_and_sessions_map_to_the_worker_of_their_latest_request(dispatches, bound, idle_s):
    homes = SiblingHomes(bound, idle_s)
    now_s, groups, sessions = 0.0, {}, {}  # key -> worker, when; in the order of their last use
    for worker_id, session, parent, tenant, later_s in dispatches:
        now_s += later_s
        homes.observe(dispatched(worker_id, session, parent, now_s, tenant))
        homes.observe(Finish(now_s, 1))
        homes.observe(WorkerChange(now_s, worker_id, "draining"))
        table, name = (sessions, session) if parent is None else (groups, parent)
        if name is not None:
            table.pop((tenant, name), None)
            table[tenant, name] = worker_id, now_s
    kept_groups = dict(list(groups.items())[-bound:])
    kept_sessions = dict(list(sessions.items())[-bound:])
    assert len(homes) <= 2 * bound
    fleet = fleet_of(worker_id=[0, 1, 2])
    for tenant in ("t", None):
        for session in ("a", "b", "c", None):
            for parent in ("a", "b", None):
                request = request_of(session=session, parent=parent, tenant=tenant, now_s=now_s)
                kept, name = (kept_sessions, session) if parent is None else (kept_groups, parent)
                worker_id, since_s = kept.get((tenant, name), (None, 0.0))
                idle = parent is not None and now_s - since_s >= idle_s
                rows = homes.rows(request, fleet)
                if worker_id in (None, 3) or idle:
                    assert rows is None
                else:
                    assert fleet.worker_id[rows].tolist() == [worker_id]


# --- expected wait --------------------------------------------------------------------------------

FIRST_TWO = request_of(draw=0.0)  # rows 0 and 1, in this order


def test_expected_wait_adds_queue_drain_time_and_kv_barrier():
    columns = {
        "queued_prefill_tokens": [3_000.0, 1_000.0, 0.0],
        "running": [20, 0, 0],
        "step_s": 0.01,
        "kv_used_tokens": [80.0, 50.0, 0.0],
        "kv_capacity_tokens": 100.0,
    }
    # 20 requests give 2,000 tokens/s; nothing runs at row 1: 2,000, too. Barriers 4 and 1.
    costs = costs_of(SmgExpectedWait(), FIRST_TWO, **columns)
    assert costs == pytest.approx([1.5 + 0.6, 0.5 + 0.15, inf])
    one_rate = SmgExpectedWait(tokens_per_s=1_000.0, kv_weight_s=1.0)
    assert costs_of(one_rate, FIRST_TWO, **columns) == pytest.approx([3.0 + 4.0, 1.0 + 1.0, inf])
    full = columns | {"kv_used_tokens": [900.0, 50.0, 0.0]}
    assert costs_of(SmgExpectedWait(), FIRST_TWO, **full)[0] == pytest.approx(1.5 + 149.85)


def test_expected_wait_estimates_an_unreported_worker_from_the_others():
    columns = {
        "queued_prefill_tokens": [2_000.0, 9_000.0],
        "running": [10, 4],
        "waiting": [0, 1],
        "step_s": 0.01,
        "kv_used_tokens": [50.0, NAN],
        "kv_capacity_tokens": 100.0,
    }
    # 1,000 tokens/s at row 0: 2.15 s; row 1 as long, and five requests of 1,024 tokens.
    costs = costs_of(SmgExpectedWait(), FIRST_TWO, **columns)
    assert costs == pytest.approx([2.15, 2.15 + 5.12])
    silent = columns | {"kv_used_tokens": NAN}
    assert costs_of(SmgExpectedWait(), FIRST_TWO, **silent) == pytest.approx([10.0, 5.0])


def test_expected_wait_favours_no_row_when_all_are_equal():
    fleet = fleet_of(running=[1] * 8, kv_used_tokens=9.0, kv_capacity_tokens=100.0)
    draws = (np.arange(5_600) + 0.5) / 5_600
    rows = [pick(SmgExpectedWait().costs(request_of(draw=d), fleet, None), d) for d in draws]
    assert np.bincount(rows).tolist() == [700] * 8


@pytest.mark.parametrize(
    ("policy", "bad"),
    [
        (DynamoTwoTier, {"match_threshold": 1.5}),
        (DynamoTwoTier, {"match_threshold": NAN}),
        (DynamoTwoTier, {"balance_abs": -1}),
        (DynamoTwoTier, {"balance_rel": 0.9}),
        (DynamoLoadGuard, {"max_requests": -1}),
        (DynamoLoadGuard, {"move_margin": 0}),
        (DynamoLoadGuard, {"binding": "group"}),
        (DynamoLoadGuard, {"max_sessions": 0}),
        (DynamoSubagentGroup, {"max_requests": -1}),
        (DynamoSubagentGroup, {"idle_s": 0.0}),
        (DynamoSubagentGroup, {"idle_s": NAN}),
        (SmgExpectedWait, {"kv_weight_s": -1.0}),
        (SmgExpectedWait, {"idle_tokens_per_s": 0.0}),
        (SmgExpectedWait, {"request_tokens": inf}),
        (SmgExpectedWait, {"tokens_per_s": NAN}),
    ],
)
def test_invalid_parameters_are_rejected(policy, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        policy(**bad)
