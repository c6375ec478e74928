"""Tests of the details of decisions and holds: which are kept, how many, and what happens with a
faulty plug-in.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Arrival
from policies.load import LoadedPolicy
from router.core.contract.actions import (
    MAX_TERMS,
    SHOWN_WORKERS,
    Candidate,
    Decision,
    Dispatch,
    Hold,
    Stage,
    TermsError,
    checked_terms,
    details_of,
    regret_hit_tokens,
    regret_s,
    runner_up,
)
from router.core.core import RouterCore
from router.core.placement.choice import Choice, Withheld
from router.core.placement.guard import PolicyFaultError
from router.record.explain import everything, explanation, explanation_line
from router.record.request_record import Attempt
from tests.policies.fleet import fleet_of, request_of
from tests.router.core.core_world import World
from tests.told_decision import decision_in


class Termed:
    """A policy with two terms, whose sum is the cost; a test may replace its terms.
    Lifetime: test.
    """

    unit = "s"

    def __init__(self) -> None:
        self.term_calls = 0
        self.give: Any = None
        self.holds = False

    def costs(self, request: Any, fleet: Any, state: Any) -> Any:
        if self.holds:
            return np.full(len(fleet), np.inf)
        return fleet.requests + fleet.worker_id * 0.25

    def terms(self, request: Any, fleet: Any, state: Any) -> Any:
        self.term_calls += 1
        if self.give:
            return self.give(len(fleet))
        return {"requests": fleet.requests, "id": fleet.worker_id * 0.25}


class TermedWorld(World):
    """A world with a core whose policy names the terms of its costs. Lifetime: test."""

    def __init__(self, workers: int = 2) -> None:
        super().__init__(workers=workers)
        self.policy = Termed()
        self.faults: list[PolicyFaultError] = []
        self.core = RouterCore(
            LoadedPolicy("termed", {}, 0.0, self.policy),
            self.core.settings,
            report=self.faults.append,
        )
        for worker_id in range(workers):
            self.join(worker_id)

    def sent(self, **fields: Any) -> Dispatch:
        (action,) = self.core.on_arrival(self.arrival([1], **fields))
        assert isinstance(action, Dispatch)
        return action


def test_terms_are_not_computed_unless_they_are_read() -> None:
    world = TermedWorld()
    assert world.sent().decision.details is None
    assert world.policy.term_calls == 0


def test_details_show_the_load_before_the_request_was_charged() -> None:
    world = TermedWorld()
    world.core.chooser.explains_all = True
    first, second = world.sent().decision, world.sent().decision
    assert first.details is not None
    assert second.details is not None
    assert [one.worker_id for one in first.details.seen] == [0, 1]
    assert [one.columns["requests"] for one in first.details.seen] == [0, 0]
    # Now worker 0 has one request: the other one is chosen, and stands first.
    assert [one.worker_id for one in second.details.seen] == [1, 0]
    assert [one.terms for one in second.details.seen] == [
        {"requests": 0.0, "id": 0.25},
        {"requests": 1.0, "id": 0.0},
    ]
    for one in second.details.seen:
        assert one.cost == sum(one.terms.values())


def test_only_the_requested_decisions_keep_details() -> None:
    world = TermedWorld()
    world.core.chooser.explained.add(7)
    kept = [world.sent(request_id=number).decision.details for number in (6, 7, 8)]
    assert [details is not None for details in kept] == [False, True, False]


def test_details_contain_neither_session_nor_tenant_nor_chain() -> None:
    world = TermedWorld()
    world.core.chooser.explains_all = True
    details = world.sent(session="ann's secret", tenant="a company").decision.details
    assert details is not None
    encoded = msgspec.json.encode(everything(details)).decode()
    assert "secret" not in encoded
    assert "company" not in encoded
    assert '"chain"' not in encoded


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda rows: 1 / 0, "ZeroDivisionError"),
        (lambda rows: 7, "object is not iterable"),
        (lambda rows: {str(n): np.zeros(rows) for n in range(MAX_TERMS + 1)}, "at most 16 names"),
        (lambda rows: {"far": np.zeros(rows + 1)}, "term far is float64 of shape (3,)"),
        (lambda rows: {"text": np.array(["a"] * rows)}, "term text is <U1"),
        (lambda rows: {"x" * 65: np.zeros(rows)}, "at most 64 characters"),
        (lambda rows: {"a\r\nset-cookie: b": np.zeros(rows)}, "a term's name must be text"),
        (lambda rows: {1: np.zeros(rows)}, "a term's name must be text"),
    ],
)
def test_invalid_terms_do_not_affect_requests(give: Any, message: str) -> None:
    world = TermedWorld()
    world.core.chooser.explains_all = True
    world.policy.give = give
    for _ in range(20):
        decision = world.sent().decision
        assert (decision.policy, decision.reason) == ("termed", "policy")
        assert decision.details is not None
        assert decision.details.seen[0].terms == {}
    assert world.core.guard.faults == {("termed", "terms"): 20}
    assert message in str(world.faults[0])
    assert not world.core.guard.suspension.active


def test_the_explanation_of_a_hold_has_the_time_held_so_far() -> None:
    world = TermedWorld()
    world.policy.holds = True
    arrival = world.arrival([1], now_s=1.0)
    (action,) = world.core.on_arrival(arrival)
    assert isinstance(action, Hold)
    why = world.core.explain_held(arrival.request_id, 3.5)
    assert isinstance(why, Withheld)
    assert why.policy == "termed"
    assert why.details.request["held_s"] == 2.5
    assert [one.cost for one in why.details.seen] == [np.inf, np.inf]
    assert why.details.seen[0].terms == {"requests": 0.0, "id": 0.0}
    assert world.core.held_requests == 1
    world.policy.holds = False
    assert isinstance(world.core.explain_held(arrival.request_id, 4.0), Choice)
    assert world.core.held_requests == 1  # asking sends nothing
    assert world.core.explain_held(12_345, 4.0) is None


@given(
    costs=st.lists(st.one_of(st.floats(0, 100), st.just(np.inf)), min_size=1, max_size=40),
    data=st.data(),
)
def test_details_list_the_chosen_then_the_cheapest_then_the_most_hits(
    costs: list[float], data: Any
) -> None:
    rows = len(costs)
    hits = data.draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows))
    finite = [row for row in range(rows) if np.isfinite(costs[row])]
    chosen = data.draw(st.sampled_from(finite)) if finite else -1
    details = details_of(
        request_of(prompt_tokens=100),
        fleet_of(hit_tokens=hits),
        np.array(costs),
        chosen,
        {"cost": np.array(costs)},
    )
    by_cost = sorted((row for row in finite if row != chosen), key=lambda row: costs[row])
    ruled_out = [row for row in range(rows) if row not in finite]
    by_hits = sorted(ruled_out, key=lambda row: -hits[row])
    expected = [*([chosen] if chosen >= 0 else []), *by_cost, *by_hits][:SHOWN_WORKERS]
    assert [one.worker_id for one in details.seen] == expected
    assert [one.cost for one in details.seen] == [costs[row] for row in expected]
    assert details.workers == rows


def test_the_decision_header_of_1000_workers_fits_client_limits() -> None:
    rows = 1_000
    names = [f"a_term_with_a_name_of_sixty_four_characters_{n:020}" for n in range(MAX_TERMS)]
    terms = {name: np.full(rows, -1.23456789e-200) for name in names}
    details = details_of(
        request_of(prompt_tokens=100), fleet_of(hit_tokens=[7] * rows), np.zeros(rows), 3, terms
    )
    best = tuple(Candidate(one.worker_id, one.cost, 7) for one in details.seen[:3])
    decision = Decision("p", "policy", 7, 100, best, False)
    decision.details = details
    of = Arrival(0.0, 1, "m", 100, {})
    one, first = (Attempt(of, Dispatch(1, (Stage(n, "both"),), decision), 0.0) for n in (3, 5))
    one.routed_by = "a reason " * 50
    for full in (False, True):
        for prefill in (None, first):
            line = explanation_line(one, full, prefill)
            assert len(line) <= 6_000
            decoded = decision_in(line.decode("ascii"))
            assert (decoded["worker"], decoded.get("prefill_worker")) == (3, prefill and 5)
    assert len(everything(details)["workers"]) == SHOWN_WORKERS


def test_checked_terms_are_floats() -> None:
    checked = checked_terms({"a": [True, False], "b": np.array([1, 2], dtype=np.uint8)}, 2)
    assert {name: term.dtype.char for name, term in checked.items()} == {"a": "d", "b": "d"}
    with pytest.raises(TermsError):
        checked_terms({"a": [1.0]}, 2)


def decided(unit: str | None, *best: tuple[int, float, int]) -> Decision:
    decision = Decision("p", "policy", 0, 100, tuple(Candidate(*one) for one in best), False)
    decision.unit = unit
    return decision


def test_regret_is_the_actual_time_minus_the_cost_of_the_runner_up() -> None:
    decision = decided("s", (4, 0.2, 64), (1, 0.25, 96))
    assert runner_up(decision) == Candidate(1, 0.25, 96)
    assert regret_s(decision, 0.75) == 0.5
    assert regret_s(decision, 0.125) == -0.125  # it was right
    assert regret_s(decision, None) is None
    assert regret_s(decided("tokens", (4, 200.0, 64), (1, 250.0, 96)), 0.75) is None
    assert regret_s(decided("s", (4, 0.2, 64)), 0.75) is None
    assert regret_hit_tokens(decision, 64) == 32
    assert regret_hit_tokens(decision, 100) == 0
    assert regret_hit_tokens(decision, None) is None
    assert regret_hit_tokens(decided("s", (4, 0.2, 64)), 0) is None
    decision.approximate = True  # the worker counts other tokens
    assert regret_hit_tokens(decision, 64) is None


def test_the_terms_of_hybrid_add_up_to_its_costs() -> None:
    world = World(workers=3)
    world.core.chooser.explains_all = True
    for number in range(4):
        (action,) = world.core.on_arrival(world.arrival([number, 9]))
        assert isinstance(action, Dispatch)
        assert action.decision.unit == "s"
        assert action.decision.details is not None
        for one in action.decision.details.seen:
            assert one.cost == pytest.approx(sum(one.terms.values()))
        shown = explanation(number, action.worker_id, action.decision)
        assert shown["best"][0]["terms"].keys() == {"missing_s", "queued_s", "requests_s"}
