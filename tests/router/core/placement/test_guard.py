"""Tests of how a core guards a failing policy: suspension, retry, memory, time limit, and cost
terms.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.facts import FirstToken, Tick
from policies.load import LoadedPolicy
from router.core.contract.actions import Dispatch
from router.core.core import RouterCore
from router.core.placement.guard import PolicyFaultError
from tests.router.core.core_world import World
from tests.router.core.placement.failing_policies import fails


class Counting:
    """A policy that counts the facts that it has observed, and fails when a test asks for it.
    Lifetime: test.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.seen = 0
        self.calls = 0
        self.fails_to = set[str]()
        self.takes_s = 0.0
        self.clock_s = 0.0

    def _call(self, name: str) -> None:
        self.clock_s += self.takes_s
        if name in self.fails_to:
            fails()

    def initial_state(self) -> list[Any]:
        self._call("begin")
        self.begun += 1
        return []

    def observe(self, fact: Any, state: list[Any]) -> list[Any]:
        self.seen += 1
        self._call("observe")
        return [*state, fact]

    def costs(self, request: Any, fleet: Any, state: list[Any]) -> Any:
        self.calls += 1
        self.remembered = len(state)
        self._call("costs")
        return np.zeros(len(fleet))


class GuardedWorld(World):
    """A world of two workers whose policy counts facts. Lifetime: test."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.policy = Counting()
        self.faults: list[PolicyFaultError] = []
        self.core = RouterCore(
            LoadedPolicy("counting", {}, 0.0, self.policy),
            self.core.settings,
            report=self.faults.append,
            clock=lambda: self.policy.clock_s,
        )
        for worker_id in range(2):
            self.join(worker_id)

    def ask(self, now_s: float) -> Dispatch:
        (action,) = self.core.on_arrival(self.arrival([1], now_s=now_s))
        assert isinstance(action, Dispatch)
        guard = self.core.guard
        if guard.overdue_s:  # as the dispatcher does
            guard.settle_slow(now_s, guard.overdue_s)
        return action

    def reasons(self, now_s: float, count: int) -> list[str]:
        return [self.ask(now_s).decision.reason for _ in range(count)]


def test_a_suspended_policy_is_not_called_after_five_faults_in_a_row() -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"costs"}
    assert world.reasons(1.0, 5) == ["fallback"] * 5
    assert [fault.suspended_s for fault in world.faults] == [0, 0, 0, 0, 10]
    calls, seen = world.policy.calls, world.policy.seen
    world.policy.fails_to = set()
    assert world.reasons(10.9, 5) == ["fallback"] * 5
    world.core.on_tick(Tick(10.95))
    assert (world.policy.calls, world.policy.seen) == (calls, seen)
    assert len(world.faults) == 5


def test_a_suspended_policy_is_retried_with_a_new_state() -> None:
    world = GuardedWorld()
    assert world.reasons(0.5, 3) == ["policy"] * 3
    world.policy.fails_to = {"costs"}
    world.reasons(1.0, 5)
    world.policy.fails_to = set()
    assert world.reasons(11.0, 2) == ["policy"] * 2
    assert world.policy.begun == 2
    # The first one's dispatch and the second one's arrival: that of the first came too early.
    assert world.policy.remembered == 2


@pytest.mark.parametrize("fault", ["begin", "costs", "observe"])
def test_one_fault_during_the_trial_suspends_again_for_twice_as_long(fault: str) -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"costs"}
    world.reasons(0.0, 5)
    world.policy.fails_to = {fault}
    world.ask(10.0)
    assert world.core.guard.suspension.active
    assert world.core.guard.suspension.until_s == 30.0
    assert world.faults[-1].suspended_s == 20.0


def test_a_failing_observe_counts_against_the_decision_before_it() -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"observe"}
    world.reasons(0.0, 3)  # and what the first one's arrival did counts as one
    assert not world.core.guard.suspension.active
    world.ask(0.0)
    assert world.core.guard.suspension.active
    assert {fault.kind for fault in world.faults} == {"raised"}


def test_slow_costs_are_used_and_five_slow_calls_suspend_the_policy() -> None:
    world = GuardedWorld()
    world.policy.takes_s = 0.004
    assert world.reasons(0.0, 8) == ["policy"] * 8
    assert not world.faults
    world.policy.takes_s = 0.006
    assert world.reasons(0.0, 6) == ["policy"] * 5 + ["fallback"]
    assert {fault.kind for fault in world.faults} == {"slow"}
    assert "took 6.0 ms for one call; more than 5 ms is slow" in str(world.faults[0])


def test_preempted_time_does_not_count_as_slow_but_waiting_does() -> None:
    world = GuardedWorld()
    used = [0.0, 0]
    world.core.guard.use = lambda: SimpleNamespace(ru_utime=used[0], ru_stime=0.0, ru_nvcsw=used[1])
    world.policy.takes_s = 0.5
    assert world.reasons(0.0, 8) == ["policy"] * 8
    assert not world.faults

    def waits(*arguments: Any) -> Any:
        used[1] += 1
        world.policy.clock_s += 0.006
        return np.zeros(2)

    def computes(*arguments: Any) -> Any:
        used[0] += 0.007
        world.policy.clock_s += 0.5
        return np.zeros(2)

    for number, costs in enumerate((waits, computes), start=1):
        world.policy.takes_s = 0.0
        world.policy.costs = costs  # type: ignore[method-assign]
        assert world.reasons(0.0, 1) == ["policy"]
        assert len(world.faults) == number
    assert "took 6.0 ms" in str(world.faults[0])
    assert "took 7.0 ms" in str(world.faults[1])


def test_faults_in_explanations_do_not_suspend_the_policy() -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"costs"}
    for _ in range(20):
        choice = world.core.explain(world.arrival([1]))
        assert choice.decision.reason == "fallback"
    assert len(world.faults) == 20
    assert not world.core.guard.suspension.active


def test_the_start_of_the_current_call_is_cleared_between_calls() -> None:
    world = GuardedWorld()
    guard, during = world.core.guard, []
    ask = world.policy.costs

    def costs(request: Any, fleet: Any, state: Any) -> Any:
        during.append(guard.since_s)
        return ask(request, fleet, state)

    world.policy.costs = costs  # type: ignore[method-assign]
    world.policy.clock_s = 5.0
    world.ask(0.0)
    world.policy.fails_to = {"costs", "observe"}
    world.ask(0.0)
    assert during == [5.0, 5.0]
    assert guard.since_s == float("inf")


def test_faults_of_policies_beyond_a_limit_are_counted_under_one_name() -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"costs"}
    for number in range(100):
        world.core.set_policy(LoadedPolicy(f"plugin:{number}", {}, 0.0, world.policy))
        world.ask(0.0)
    assert len(world.core.guard.faults) == 65
    assert world.core.guard.faults["other", "raised"] == 36


def test_setting_a_policy_again_clears_its_faults() -> None:
    world = GuardedWorld()
    world.policy.fails_to = {"costs"}
    world.reasons(0.0, 5)
    world.policy.fails_to = set()
    world.core.set_policy(world.core.policy)
    assert world.ask(0.0).decision.reason == "policy"
    world.core.on_first_token(FirstToken(0.0, 0))
    assert not world.core.guard.suspension.active
