"""Tests of the properties that every combination of wrappers with every policy has for any view."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import POLICIES, WRAPPERS
from policies.facts import Dispatched, Tick
from policies.load import load
from policies.pick import HOLD, pick
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of
from tests.policies.views import columns_of, fleets, requests

MAY_HOLD = {"late_binding"}
limits = st.sampled_from(["none", "1", "37.5", "5000"])
PARAMETERS = {
    "thresholds": {"max_requests": limits, "max_queued_tokens": limits}
    | {"max_kv_fraction": st.sampled_from(["none", "0.01", "1"])}
    | {"spread": st.sampled_from(["none", "0", "2"])},
    "bounded_load": {"epsilon": st.sampled_from(["0", "0.25", "100"])},
    "late_binding": {"max_wait_s": st.sampled_from(["0.001", "1", "1000"])},
    "progressive": {"low": st.sampled_from(["0", "0.3"]), "high": st.sampled_from(["0.5", "2"])}
    | {"load_factor": st.sampled_from(["0", "1", "50"])},
}
ages = st.sampled_from([0.1, 4.0, 60.0, float("inf")])


@st.composite
def wrappers(draw):
    """Draw a specification of one to four wrappers in any order, with parameters."""
    names = draw(st.lists(st.sampled_from(list(WRAPPERS)), min_size=1, max_size=4, unique=True))
    parts = []
    for name in names:
        parameters = {key: draw(values) for key, values in PARAMETERS[name].items()}
        parts.append(name + "?" + "&".join(f"{key}={value}" for key, value in parameters.items()))
    return "|".join(parts)


@st.composite
def views(draw):
    """Draw a request that may have waited, a fleet of any age, and some earlier dispatches."""
    request = replace(draw(requests), held_s=draw(st.sampled_from([0.0, 0.02, 50.0])), now_s=9.0)
    fleet = draw(fleets())
    told_s = np.array([draw(ages) for _ in range(len(fleet))])
    fleet = replace(fleet, load_age_s=told_s, event_age_s=told_s)
    chain = np.arange(4, dtype=np.uint64)
    worker_ids = st.sampled_from(fleet.worker_id.tolist())
    facts = [
        Dispatched(9.0 + n / 500, n, draw(worker_ids), 64, draw(st.integers(1, 9_000)), chain)
        for n in range(draw(st.integers(0, 4)))
    ]
    return request, fleet, [*facts, Tick(9.0)]


def test_every_wrapper_is_covered():
    assert PARAMETERS.keys() == WRAPPERS.keys()


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=examples(15))
@given(stack=wrappers(), view=views())
def test_any_stack_of_wrappers_around_any_policy_keeps_the_contract(name, stack, view):
    request, fleet, facts = view
    policy = load(f"{name}|{stack}")
    state, again = policy.initial_state(), policy.initial_state()
    for fact in facts:
        state, again = policy.observe(fact, state), policy.observe(fact, again)
    before = {key: column.copy() for key, column in columns_of(fleet).items()}
    for column in columns_of(fleet).values():
        column.setflags(write=False)
    first = policy.costs(request, fleet, state).copy()
    np.testing.assert_array_equal(first, policy.costs(request, fleet, state))
    np.testing.assert_array_equal(first, policy.costs(request, fleet, again))
    assert first.shape == (len(fleet),)
    assert first.dtype == np.float64
    assert not np.isnan(first).any()
    assert not (first == -np.inf).any()
    for key, column in columns_of(fleet).items():
        np.testing.assert_array_equal(column, before[key])
    if not any(wrapper.name in MAY_HOLD for wrapper in policy.wrappers):
        assert pick(first, request.draw) != HOLD
    for wrapper, its in zip(policy.wrappers, state[1:], strict=True):
        inner = np.where(np.arange(len(fleet)) % 2, np.inf, np.arange(len(fleet), dtype=float))
        outer = wrapper.adjust(inner, request, fleet, its)
        assert (outer[np.isinf(inner)] == np.inf).all(), "what the policy shut stays shut"


@settings(max_examples=examples(100))
@given(stack=wrappers(), view=views(), name=st.sampled_from(["kv_prefix", "hybrid"]))
def test_the_cost_is_the_inner_cost_plus_the_terms_of_the_wrappers(stack, view, name):
    request, fleet, facts = view
    policy = load(f"{name}|{stack}")
    state = policy.initial_state()
    for fact in facts:
        state = policy.observe(fact, state)
    terms = policy.terms(request, fleet, state)
    inner = load(name)
    own = inner.terms(request, fleet, None) or {name: inner.costs(request, fleet, None)}
    for term, values in own.items():
        np.testing.assert_array_equal(terms[term], values)
    added = [inner.costs(request, fleet, None)]
    added += [terms[wrapper.name] for wrapper in policy.wrappers]
    assert all(term.shape == (len(fleet),) for term in terms.values())
    np.testing.assert_allclose(sum(added), policy.costs(request, fleet, state), rtol=1e-9)


@settings(max_examples=examples(100))
@given(stack=wrappers(), view=views(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_change_costs(stack, view, seed):
    request, fleet, facts = view
    order = np.random.default_rng(seed).permutation(len(fleet))
    shuffled = replace(fleet, **{k: column[order] for k, column in columns_of(fleet).items()})
    # Of holders that would be ready at the same time, late_binding waits for the first.
    symmetric = [part for part in stack.split("|") if not part.startswith("late_binding")]
    policy = load("|".join(["hybrid", *symmetric]))
    state = policy.initial_state()
    for fact in facts:
        state = policy.observe(fact, state)
    straight = policy.costs(request, fleet, state)[order]
    np.testing.assert_allclose(policy.costs(request, shuffled, state), straight, rtol=1e-6)


@given(view=views(), stack=wrappers())
@settings(max_examples=examples(50))
def test_the_only_worker_is_never_excluded(view, stack):
    request, _, _ = view
    policy = load(f"kv_prefix|{stack}")
    fleet = fleet_of(hit_tokens=[100], queued_prefill_tokens=[1e6], running=[5_000])
    assert pick(policy.costs(request, fleet, policy.initial_state()), request.draw) == 0


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_an_empty_pool_has_no_costs(name):
    policy = load(f"kv_prefix|{name}")
    fleet = fleet_of(worker_id=[])
    assert policy.costs(request_of(), fleet, policy.initial_state()).shape == (0,)
