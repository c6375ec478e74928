"""Tests of the properties that every built-in policy has for any view."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import POLICIES
from policies.load import load
from policies.pick import pick
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of
from tests.policies.views import columns_of, fleets, requests, state_after_dispatches

# Policies that prefer a row by its place; their docstrings say so.
POINTING = ("round_robin", "power_of_two", "trt_llm", "ray_prefix", "smg_expected_wait")
SYMMETRIC = [name for name in POLICIES if name not in POINTING]
HOLDING = ("thunder_agent",)  # it holds requests of paused programs, even with workers
every_policy = pytest.mark.parametrize("name", list(POLICIES))


@every_policy
@settings(max_examples=examples(40))
@given(request=requests, fleet=fleets())
def test_costs_are_repeatable_valid_floats_and_the_view_is_unchanged(name, request, fleet):
    policy = load(name)
    before = {key: column.copy() for key, column in columns_of(fleet).items()}
    for column in columns_of(fleet).values():
        column.setflags(write=False)
    request.chain.setflags(write=False)
    state = state_after_dispatches(policy, fleet)
    first, second = (policy.costs(request, fleet, state) for _ in range(2))
    assert first.shape == (len(fleet),)
    assert first.dtype == np.float64
    assert not np.isnan(first).any()
    assert not (first == -np.inf).any()
    if name not in HOLDING:
        assert np.isfinite(first).any(), "no other built-in holds while there is a worker"
    np.testing.assert_array_equal(first, second)
    for key, column in columns_of(fleet).items():
        np.testing.assert_array_equal(column, before[key])
        assert not np.shares_memory(first, column), f"the costs are a view of {key}"


@pytest.mark.parametrize("name", SYMMETRIC)
@settings(max_examples=examples(40))
@given(request=requests, fleet=fleets(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_change_costs(name, request, fleet, seed):
    order = np.random.default_rng(seed).permutation(len(fleet))
    shuffled = replace(fleet, **{k: column[order] for k, column in columns_of(fleet).items()})
    policy = load(name)
    state = state_after_dispatches(policy, fleet, seed)
    straight = policy.costs(request, fleet, state)[order]
    np.testing.assert_allclose(policy.costs(request, shuffled, state), straight, rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in HOLDING])
@given(request=requests, fleet=fleets(rows_max=1))
@settings(max_examples=examples(20))
def test_the_only_worker_is_always_chosen(name, request, fleet):
    policy = load(name)
    assert (
        pick(policy.costs(request, fleet, state_after_dispatches(policy, fleet)), request.draw) == 0
    )


@every_policy
def test_an_empty_pool_has_no_costs(name):
    policy = load(name)
    costs = policy.costs(request_of(), fleet_of(worker_id=[]), policy.initial_state())
    assert costs.shape == (0,)
