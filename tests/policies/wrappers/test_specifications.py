"""Tests of wrappers by specification: chains, parameters, users' own wrappers, and the refusals
with their text.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from policies import POLICIES, WRAPPERS
from policies import load as naming
from policies.facts import Tick
from policies.load import PolicyError, load, name_of, wrapper_names
from tests.policies import planted_wrappers
from tests.policies.fleet import fleet_of, request_of
from tests.policies.planted_wrappers import INF

HERE = planted_wrappers.__name__


def costs_of(spec: str, **columns: Any) -> list[float]:
    policy = load(spec)
    return policy.costs(request_of(), fleet_of(**columns), policy.initial_state()).tolist()


def test_wrappers_apply_in_order_each_with_its_own_parameters():
    running = {"running": [1, 2]}
    assert costs_of("least_requests", **running) == [1.0, 2.0]
    assert costs_of(f"least_requests|{HERE}:shifted?by=5", **running) == [6.0, 7.0]
    both = f"least_requests|{HERE}:shifted?by=5|{HERE}:first_row_out"
    assert costs_of(both, **running) == [INF, 7.0]
    policy = load(both)
    assert policy.name == f"least_requests|{HERE}:shifted|{HERE}:first_row_out"
    assert policy.params == {f"{HERE}:shifted.by": 5.0, f"{HERE}:shifted.label": ""}


def test_the_specification_loads_the_same_chain_again():
    for spec in (
        "hybrid?load_factor=2&temperature=0.5|bounded_load?epsilon=0.1|late_binding",
        "random|thresholds?max_requests=4&spread=2.5",
        f"random|{HERE}:shifted?label=a%7Cb%3Fc%26d%25|{HERE}:Counting?step=3",
        *(f"kv_prefix|{name}" for name in WRAPPERS),
    ):
        policy = load(spec)
        again = load(policy.spec)
        assert (again.name, again.params, again.spec) == (policy.name, policy.params, policy.spec)
        assert again.temperature == policy.temperature
        assert name_of(policy.spec) == policy.name
    labelled = load(f"random|{HERE}:shifted?label=a%7Cb%3Fc%26d%25")
    assert labelled.params[f"{HERE}:shifted.label"] == "a|b?c&d%"
    assert load("hybrid").spec == load("hybrid|thresholds").spec.partition("|")[0]


def test_the_policy_and_each_wrapper_have_their_own_state():
    policy = load(f"tests.policies.counting:Counting?step=10|{HERE}:Counting|thresholds")
    assert policy.remembers
    state = policy.initial_state()
    assert state == (0, 0, None)
    for fact in ("a", Tick(1.0)):
        state = policy.observe(fact, state)
    assert state == (20, 2, None)
    assert policy.costs(request_of(), fleet_of(), state).tolist() == [22.0]
    assert not load("random|thresholds").remembers
    assert load("random|progressive").remembers


def test_terms_show_the_share_of_the_policy_and_each_wrapper():
    policy = load(f"{HERE}:by_requests|{HERE}:Counting|{HERE}:first_row_out")
    state = policy.observe("a", policy.initial_state())
    terms = policy.terms(request_of(), fleet_of(running=[4, 2]), state)
    assert {name: term.tolist() for name, term in terms.items()} == {
        f"{HERE}:by_requests": [4.0, 2.0],
        f"{HERE}:Counting": [1.0, 1.0],
        f"{HERE}:Counting.seen": [1.0, 1.0],
        f"{HERE}:first_row_out": [INF, 0.0],
    }
    assert load(f"{HERE}:by_requests").terms(request_of(), fleet_of(), None) == {}
    twice = load(f"{HERE}:by_requests|{HERE}:first_row_out|{HERE}:shifted")
    added = twice.terms(request_of(), fleet_of(running=[4, 2]), twice.initial_state())
    assert added[f"{HERE}:shifted"].tolist() == [0.0, 1.0], "+inf before and after: added nothing"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hybrid|treshold", r"no wrapper 'treshold' \(did you mean thresholds\?\); valid: thresh"),
        ("hybrid|", "no wrapper ''"),
        ("|thresholds", "no policy ''"),
        ("thresholds", "no policy 'thresholds'"),
        ("hybrid|kv_prefix", "no wrapper 'kv_prefix': it is a policy, which stands .* first"),
        ("hybrid|bounded_load?eps=1", r"no parameter 'eps' \(did you mean epsilon\?\); valid: eps"),
        ("hybrid|bounded_load?epsilon=-1", "wrapper bounded_load: epsilon is -1.0"),
        ("hybrid|bounded_load?epsilon=nan", "epsilon is nan"),
        ("hybrid|bounded_load?temperature=1", "no parameter 'temperature'"),
        ("hybrid|bounded_load?epsilon", "key=value"),
        ("hybrid|thresholds?max_requests=0", "max_requests is 0.0"),
        ("hybrid|thresholds?max_kv_fraction=2", "max_kv_fraction is 2.0"),
        ("hybrid|thresholds?spread=-1", "spread is -1.0"),
        ("hybrid|late_binding?max_wait_s=0", "max_wait_s is 0.0"),
        ("hybrid|late_binding?max_wait_s=inf", "max_wait_s is inf"),
        ("hybrid|progressive?low=0.5&high=0.5", "low is 0.5 and high is 0.5"),
        ("hybrid|progressive?load_factor=-1", "load_factor is -1.0"),
        ("hybrid|thresholds|thresholds", "thresholds is given twice"),
        (f"hybrid|{HERE}:Counting?step=0", "step is 0"),
        (f"hybrid|{HERE}:nothing_here", "wrapper .* cannot import"),
        (f"hybrid|{HERE}:nan_policy", r"must be a class with a method adjust\(costs, request, fl"),
        ("hybrid|my_pkg.my_module", "`:attr` is missing; .* my_pkg.my_module:MyWrapper"),
    ],
)
def test_errors_suggest_a_valid_specification(spec, message):
    with pytest.raises(PolicyError, match=message):
        load(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"random|{HERE}:not_a_number", "wrapper .*not_a_number: cost of row 0 is nan"),
        (f"random|{HERE}:minus_infinity", "wrapper .*minus_infinity: cost of row 0 is -inf"),
        (f"random|{HERE}:too_few", r"wrapper .*too_few returned shape \(1,\) for 2 workers"),
        (f"random|{HERE}:as_list", "wrapper .*as_list returned list"),
        (f"random|{HERE}:in_place", "wrapper .*in_place failed: ValueError: .*read-only"),
        (f"{HERE}:nan_policy|thresholds", "policy .*nan_policy: cost of row 0 is nan"),
    ],
)
def test_the_error_for_wrong_costs_names_the_policy_or_wrapper(spec, message):
    with pytest.raises(PolicyError, match=message):
        costs_of(spec, running=[0, 1])


def test_the_error_for_a_failing_observe_names_the_wrapper():
    policy = load(f"random|{HERE}:Counting")
    with pytest.raises(PolicyError, match=r"wrapper .*Counting failed: TypeError: no such fact"):
        policy.observe("bad", policy.initial_state())


def test_wrappers_do_not_change_a_column_that_the_policy_returned():
    fleet = fleet_of(queued_prefill_tokens=[5.0, 6.0])
    policy = load(f"{HERE}:waiting_column|{HERE}:shifted")
    assert policy.costs(request_of(), fleet, policy.initial_state()).tolist() == [6.0, 7.0]
    assert fleet.queued_prefill_tokens.tolist() == [5.0, 6.0]


def test_installed_entry_points_are_wrapper_names(monkeypatch):
    entries = {
        "warmroute.wrappers": [
            EntryPoint("mine", f"{HERE}:shifted", "warmroute.wrappers"),
            EntryPoint("thresholds", f"{HERE}:shifted", "warmroute.wrappers"),
        ],
        "warmroute.policies": [],
    }
    monkeypatch.setattr(naming, "entry_points", lambda group: entries[group])
    assert wrapper_names() == [*WRAPPERS, "mine"]
    assert not set(wrapper_names()) & set(POLICIES)
    assert costs_of("random|mine?by=2") == [2.0]
    assert "spread" in load("random|thresholds").spec, "a built-in cannot be shadowed"
