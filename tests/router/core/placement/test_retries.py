"""Tests of retries: which failed requests are sent to another worker, when, and which are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Failure, Finish, WorkerChange
from router.core.contract.actions import Dispatch, Reject
from tests.router.core.core_world import World

PLENTY = {"retries_per_s": 1e6}
NO_EJECTION = {"ejection_failures": 1_000, "ejection_requests": 1_000_000}


def fail(world: World, request_id: int, reason: str, blame: str = "worker", retry: bool = True):
    actions = world.core.on_failure(Failure(world.now_s, request_id, blame, retry, reason))
    return next((a for a in actions if isinstance(a, Dispatch | Reject)), None)


def begun(world: World, **fields: object) -> int:
    arrival = world.arrival([1], **fields)
    (action,) = world.core.on_arrival(arrival)
    assert isinstance(action, Dispatch)
    assert action.after_s == 0.0
    return arrival.request_id


@pytest.mark.parametrize("reason", ["connect", "early_close"])
def test_the_first_retry_after_a_lost_connection_has_no_back_off(reason: str) -> None:
    world = World()
    assert fail(world, begun(world), reason).after_s == 0.0


def test_other_retries_back_off_exponentially_with_full_jitter() -> None:
    back_off = {"retry_base_s": 0.1, "retry_max_s": 0.3, "max_attempts": 9}
    world = World(6, **back_off, **PLENTY, **NO_EJECTION)
    waits: list[list[float]] = []
    for _ in range(40):
        request_id = begun(world)
        actions = [fail(world, request_id, "status_5xx") for _ in range(4)]
        waits.append([action.after_s for action in actions])
        fail(world, request_id, "left", "client", retry=False)
    for wait_s, limit_s in zip(zip(*waits, strict=True), (0.1, 0.2, 0.3, 0.3), strict=True):
        assert all(0.0 <= one_s <= limit_s for one_s in wait_s)
        assert max(wait_s) > 0.8 * limit_s  # the whole range is used ...
        assert min(wait_s) < 0.2 * limit_s
        assert len(set(wait_s)) == len(wait_s)  # ... and nobody waits as another one does


def test_failed_connections_do_not_count_as_attempts() -> None:
    world = World(8, max_attempts=2)
    request_id = begun(world)
    tried = [fail(world, request_id, "connect") for _ in range(7)]
    assert all(isinstance(action, Dispatch) for action in tried)
    last = fail(world, request_id, "connect")
    assert (last.status, last.code) == (502, "worker_error")  # everybody was tried, once
    assert len({action.worker_id for action in tried}) == 7


def test_an_ejected_worker_is_tried_if_the_request_would_be_rejected() -> None:
    world = World(2, policy="round_robin", ejection_failures=1)
    assert fail(world, begun(world), "early_close").worker_id == 1  # 0 is put aside
    request_id = begun(world)
    assert world.core.ledger.get(request_id).worker_id == 1
    assert fail(world, request_id, "status_5xx").worker_id == 0
    assert fail(world, request_id, "status_5xx").code == "worker_error"


def test_attempts_that_reached_a_worker_are_bounded() -> None:
    world = World(8, max_attempts=2)
    request_id = begun(world)
    assert isinstance(fail(world, request_id, "status_5xx"), Dispatch)
    assert fail(world, request_id, "connect").after_s > 0.0
    assert fail(world, request_id, "garbage").code == "worker_error"


def test_no_retry_exceeds_the_retry_budget() -> None:
    world = World(retry_share=0.5, retries_per_s=0.0, **NO_EJECTION)
    world.core.on_arrival(world.arrival([1]))
    first, second = begun(world), begun(world)
    assert isinstance(fail(world, first, "status_5xx"), Dispatch)
    refused = fail(world, second, "status_5xx")
    assert (refused.status, refused.code) == (503, "retry_budget_exhausted")
    assert refused.retry_after_s is not None
    assert world.core.counters.retries_refused == 1
    world.now_s = 11.0  # what was spent is forgotten, and so is what was paid in
    assert fail(world, begun(world), "status_5xx").code == "retry_budget_exhausted"
    begun(world)
    assert isinstance(fail(world, begun(world), "status_5xx"), Dispatch)


def test_retries_after_a_worker_is_lost_do_not_use_the_budget() -> None:
    none = {"retry_share": 0.0, "retries_per_s": 0.0, **NO_EJECTION}
    world = World(2, policy="round_robin", **none)
    assert isinstance(fail(world, begun(world), "connect"), Dispatch)
    for change in ("down", "gone"):
        world = World(2, policy="round_robin", **none)
        request_id = begun(world)
        world.core.on_worker(WorkerChange(world.now_s, 0, change))
        assert isinstance(fail(world, request_id, "early_close"), Dispatch)
    world = World(3, policy="round_robin", **none | {"ejection_failures": 1})
    requests = [begun(world) for _ in range(6)]  # two each
    assert isinstance(fail(world, requests[0], "early_close"), Dispatch)  # which puts it aside
    assert isinstance(fail(world, requests[3], "early_close"), Dispatch)
    assert fail(world, requests[1], "early_close").code == "retry_budget_exhausted"


def test_no_retry_starts_after_the_deadline_of_the_request() -> None:
    world = World(retry_base_s=10.0, retry_max_s=10.0)
    request_id = begun(world, deadline_s=0.001)
    late = fail(world, request_id, "status_5xx")
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert world.core.inflight_requests == 0


@given(st.lists(st.sampled_from(["fail", "finish", "leave", "wait"]), max_size=60))
def test_retries_never_exceed_their_share_and_leave_no_charges(steps: list[str]) -> None:
    world = World(4, retry_share=0.25, retries_per_s=0.0, **NO_EJECTION)
    arrivals, retried, under_way = [], [], []
    for step in [*steps, *["leave"] * 60]:
        if step == "wait":
            world.now_s += 0.7
        if step in ("fail", "wait") or not under_way:
            under_way.append(begun(world))
            arrivals.append(world.now_s)
        request_id = under_way.pop(0)
        if step == "finish":
            world.core.on_finish(Finish(world.now_s, request_id))
        elif step == "leave":
            fail(world, request_id, "left", "client", retry=False)
        elif isinstance(fail(world, request_id, "status_5xx"), Dispatch):
            retried.append(world.now_s)
            under_way.append(request_id)
        recent = [at_s for at_s in arrivals if at_s > world.now_s - 10.0]
        assert sum(at_s > world.now_s - 9.0 for at_s in retried) <= 0.25 * len(recent)
    for request_id in under_way:
        fail(world, request_id, "left", "client", retry=False)
    assert world.core.inflight_requests == len(world.core.ledger) == 0
    assert not world.core.columns.requests.any()
