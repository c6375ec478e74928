"""Tests of failing wrappers of policies: each fault is counted under the wrapper's name."""

from __future__ import annotations

import pytest

from policies.load import load
from router.core.contract.actions import Dispatch
from router.core.core import RouterCore
from router.core.placement.guard import PolicyFaultError
from tests.router.core.core_world import World

WRAPPERS = "tests.policies.planted_wrappers"


def raises(costs, request, fleet, state):
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("wrapper", "kind", "message"),
    [
        (f"{__name__}:raises", "raised", "raises failed: KeyError: 'no such column'"),
        (f"{WRAPPERS}:in_place", "raised", "in_place failed: ValueError"),
        (f"{WRAPPERS}:not_a_number", "nan", "not_a_number: cost of row 0 is nan"),
        (f"{WRAPPERS}:too_few", "shape", "too_few returned shape (1,) for 2 workers"),
    ],
)
def test_the_fallback_decides_and_the_fault_names_the_wrapper(wrapper, kind, message) -> None:
    world = World(workers=2)
    faults: list[PolicyFaultError] = []
    world.core = RouterCore(
        load(f"hybrid|thresholds|{wrapper}"), world.core.settings, report=faults.append
    )
    for worker_id in range(2):
        world.join(worker_id)
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    assert (action.decision.policy, action.decision.reason) == ("least_requests", "fallback")
    (fault,) = faults
    assert (fault.policy, fault.kind) == (f"hybrid|thresholds|{wrapper}", kind)
    assert message in str(fault)
