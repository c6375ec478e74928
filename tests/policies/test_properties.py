"""What holds for every built-in policy, whatever the view."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import POLICIES
from policies.contract import FleetView
from policies.facts import Dispatched, Finish, WorkerChange
from policies.load import LoadedPolicy, load
from policies.pick import pick
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of

# Those that point at a row by its place say so in their docstring.
POINTING = ("round_robin", "power_of_two", "trt_llm", "ray_prefix")
SYMMETRIC = [name for name in POLICIES if name not in POINTING]
every_policy = pytest.mark.parametrize("name", list(POLICIES))
counts = st.integers(0, 10_000)
amounts = st.floats(0.0, 1e6)
maybe = st.one_of(st.just(float("nan")), st.floats(1.0, 1e6))


@st.composite
def fleets(draw, rows_min=1, rows_max=8):
    n = draw(st.integers(rows_min, rows_max))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    return fleet_of(
        worker_id=sorted(draw(st.sets(counts, min_size=n, max_size=n))),
        hit_tokens=column(st.integers(0, 5_000)),
        hits_unknown=column(st.booleans()),
        queued_prefill_tokens=column(amounts),
        running=column(counts),
        waiting=column(counts),
        context_tokens=column(amounts),
        kv_used_tokens=column(maybe),
        kv_capacity_tokens=column(maybe),
        prefill_tokens_per_s=column(st.floats(1.0, 1e6)),
        step_s=column(st.floats(1e-4, 10.0)),
        max_requests=column(maybe),
        max_queued_tokens=column(maybe),
        max_kv_fraction=column(st.one_of(st.just(float("nan")), st.floats(0.01, 1.0))),
    )


requests = st.builds(
    request_of,
    prompt_tokens=st.integers(1, 5_000),
    draw=st.floats(0.0, 1.0, exclude_max=True),
    serial=st.integers(0, 2**40),
    session=st.one_of(st.none(), st.sampled_from("abc")),
)


def told(policy: LoadedPolicy, fleet: FleetView, seed: int = 0) -> Any:
    """The state of `policy` after a few dispatches to workers of `fleet` and one that is gone."""
    random = np.random.default_rng(seed)
    state = policy.initial_state()
    chain = np.arange(1, 11, dtype=np.uint64)
    for number in range(6):
        worker_id = int(random.choice(fleet.worker_id)) if len(fleet) else 7
        session = ("a", "b", None)[number % 3]
        sent = Dispatched(float(number), number, worker_id, 16, 100 * number, chain, session)
        state = policy.observe(sent, state)
    state = policy.observe(Finish(6.0, 0), state)
    return policy.observe(WorkerChange(7.0, 20_000, "gone"), state)


def columns_of(fleet: FleetView) -> dict[str, np.ndarray]:
    values = {field.name: getattr(fleet, field.name) for field in fields(FleetView)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@every_policy
@settings(max_examples=examples(40))
@given(request=requests, fleet=fleets())
def test_same_view_same_costs_of_the_right_kind_and_nothing_is_touched(name, request, fleet):
    policy = load(name)
    before = {key: column.copy() for key, column in columns_of(fleet).items()}
    for column in columns_of(fleet).values():
        column.setflags(write=False)
    request.chain.setflags(write=False)
    state = told(policy, fleet)
    first, second = (policy.costs(request, fleet, state) for _ in range(2))
    assert first.shape == (len(fleet),)
    assert first.dtype == np.float64
    assert not np.isnan(first).any()
    assert not (first == -np.inf).any()
    assert np.isfinite(first).any(), "no built-in holds a request while there is a worker"
    np.testing.assert_array_equal(first, second)
    for key, column in columns_of(fleet).items():
        np.testing.assert_array_equal(column, before[key])
        assert not np.shares_memory(first, column), f"the costs are a view of {key}"


@pytest.mark.parametrize("name", SYMMETRIC)
@settings(max_examples=examples(40))
@given(request=requests, fleet=fleets(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_matter(name, request, fleet, seed):
    order = np.random.default_rng(seed).permutation(len(fleet))
    shuffled = replace(fleet, **{k: column[order] for k, column in columns_of(fleet).items()})
    policy = load(name)
    state = told(policy, fleet, seed)
    straight = policy.costs(request, fleet, state)[order]
    np.testing.assert_allclose(policy.costs(request, shuffled, state), straight, rtol=1e-9)


@every_policy
@given(request=requests, fleet=fleets(rows_max=1))
@settings(max_examples=examples(20))
def test_a_pool_of_one_is_always_chosen(name, request, fleet):
    policy = load(name)
    assert pick(policy.costs(request, fleet, told(policy, fleet)), request.draw) == 0


@every_policy
def test_an_empty_pool_has_no_costs(name):
    policy = load(name)
    costs = policy.costs(request_of(), fleet_of(worker_id=[]), policy.initial_state())
    assert costs.shape == (0,)
