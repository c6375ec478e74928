"""Tests of failing policies: whatever a policy raises or returns, requests are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies.facts import Arrival, Finish, Tick
from policies.load import LoadedPolicy, PolicyError
from router.core.contract.actions import Dispatch, Hold
from router.core.core import RouterCore
from router.core.placement.guard import PolicyFaultError
from tests.router.core.core_world import World
from tests.router.core.placement.failing_policies import fails


class Scripted:
    """A policy that returns what the test says. Lifetime: test."""

    def __init__(self) -> None:
        self.answer: Callable[[int], Any] = np.zeros
        self.remembers: Callable[[Any], None] = lambda fact: None

    def costs(self, request, fleet, state):
        return self.answer(len(fleet))

    def observe(self, fact, state):
        self.remembers(fact)
        return state


def exits(*_: object) -> Any:
    raise SystemExit(3)


class TextlessError(Exception):
    def __str__(self) -> str:
        raise ValueError


def fails_silently(*_: object) -> Any:
    raise TextlessError


class FailingWorld(World):
    """A world whose policy returns what the test says, and which collects the policy's failures.
    Lifetime: test.
    """

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.policy = Scripted()
        self.reported: list[PolicyFaultError] = []
        self.core = RouterCore(
            LoadedPolicy("scripted", {}, 0.0, self.policy),
            self.core.settings,
            report=self.reported.append,
        )
        for worker_id in range(2):
            self.join(worker_id)

    def assert_idle(self) -> None:
        assert self.core.inflight_requests == self.core.held_requests == 0
        assert not self.core.columns.requests.any()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (fails, "raised"),
        (exits, "raised"),
        (fails_silently, "raised"),
        (lambda rows: np.full(rows, np.nan), "nan"),
        (lambda rows: np.full(rows, -np.inf), "nan"),
        (lambda rows: np.zeros(rows + 1), "shape"),
        (lambda rows: np.zeros((rows, 1)), "shape"),
        (lambda rows: np.zeros(rows, dtype=np.float32), "shape"),
        (lambda rows: [0.0] * rows, "shape"),
        (lambda rows: None, "shape"),
    ],
    ids=[
        *("raises", "exits", "textless", "nan", "minus_inf"),
        *("too_long", "column", "float32", "list", "none"),
    ],
)
def test_the_fallback_policy_decides_if_the_policy_fails(answer, kind) -> None:
    world = FailingWorld()
    world.policy.answer = answer
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    assert (action.decision.policy, action.decision.reason) == ("least_requests", "fallback")
    (fault,) = world.reported
    assert str(fault).startswith("policy scripted failed: ")
    assert (fault.policy, fault.kind) == ("scripted", kind)
    assert world.core.guard.faults == {("scripted", kind): 1}
    world.policy.answer = np.zeros
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    assert (action.decision.policy, action.decision.reason) == ("scripted", "policy")


def test_a_policy_cannot_change_the_hit_tokens_that_the_ledger_charges() -> None:
    world = FailingWorld()

    def overwrites(request: Any, fleet: Any, state: Any) -> Any:
        fleet.hit_tokens[:] = 0
        return np.zeros(len(fleet))

    world.policy.costs = overwrites
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    assert action.decision.reason == "fallback"
    (fault,) = world.reported
    assert fault.kind == "raised"
    assert "read-only" in str(fault)


def test_a_policy_failure_for_a_held_request_does_not_affect_a_finished_one() -> None:
    world = FailingWorld()
    running = world.arrival([1])
    world.core.on_arrival(running)
    world.policy.answer = lambda rows: np.full(rows, np.inf)
    held = [world.arrival([n]) for n in (2, 3)]
    for arrival in held:
        assert isinstance(world.core.on_arrival(arrival)[0], Hold)
    answers = iter([np.zeros(2)])

    def once(rows: int) -> Any:
        return next(answers)  # the second held request meets StopIteration

    world.policy.answer = once
    first, second = world.core.on_finish(Finish(1.0, running.request_id))
    assert isinstance(first, Dispatch)
    assert isinstance(second, Dispatch)
    assert [a.decision.reason for a in (first, second)] == ["held", "fallback"]
    assert {first.request_id, second.request_id} == {a.request_id for a in held}
    world.core.on_finish(Finish(2.0, first.request_id))
    world.core.on_finish(Finish(2.0, second.request_id))
    world.assert_idle()


def test_charges_are_released_if_observe_fails() -> None:
    world = FailingWorld()
    arrival = world.arrival([1])
    world.core.on_arrival(arrival)
    world.policy.remembers = fails
    world.core.on_finish(Finish(1.0, arrival.request_id))
    world.core.on_tick(Tick(2.0))
    world.assert_idle()
    assert world.core.guard.faults == {("scripted", "raised"): 2}


def test_a_policy_failure_is_raised_if_no_fault_handler_is_set() -> None:
    world = World(workers=1)
    core = RouterCore(LoadedPolicy("scripted", {}, 0.0, Scripted()), world.core.settings)
    world.core = core
    world.join(0)
    core.policy.policy.answer = fails
    with pytest.raises(PolicyError, match="broken policy"):
        core.on_arrival(world.arrival([1]))


def test_a_policy_whose_initial_state_fails_is_not_set() -> None:
    class Forgetful(Scripted):
        def initial_state(self) -> None:
            fails()

    world = FailingWorld()
    with pytest.raises(PolicyError):
        world.core.set_policy(LoadedPolicy("forgetful", {}, 0.0, Forgetful()))
    assert world.core.policy.name == "scripted"


def test_held_requests_of_one_model_do_not_block_those_of_another_model() -> None:
    world = FailingWorld()
    world.join(2, models=("other",))
    blocked = {"m"}

    def costs(rows: int) -> Any:
        return np.full(rows, np.inf if "m" in blocked and rows == 2 else 0.0)

    world.policy.answer = lambda rows: np.full(rows, np.inf)
    urgent: list[Arrival] = [world.arrival([n]) for n in range(20)]
    for arrival in [*urgent, last := world.arrival([99], model="other")]:
        world.core.on_arrival(arrival)
    world.policy.answer = costs
    (action,) = world.core.on_tick(Tick(1.0))
    assert isinstance(action, Dispatch)
    assert action.request_id == last.request_id
