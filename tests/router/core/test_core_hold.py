"""Tests of held requests: the core asks the policy again in order, their number is bounded, and
none is answered twice.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import FleetView, RequestView
from policies.facts import Fact, Failure, Finish, FirstToken, Tick
from policies.load import PolicyError
from router.core.contract.actions import Action, Dispatch, Hold, Reject
from router.core.contract.counters import HeldTimes
from tests.router.core.core_world import BLOCK, World


def never(request: RequestView, fleet: FleetView, state: object) -> np.ndarray:
    """Hold every request: a policy for tests."""
    return np.full(len(fleet), np.inf)


def below_two(request: RequestView, fleet: FleetView, state: object) -> np.ndarray:
    """Choose a worker without a request, and hold the request if there is none: a policy
    for tests.
    """
    return np.where(fleet.requests < 1, fleet.requests.astype(float), np.inf)


def at_last(request: RequestView, fleet: FleetView, state: object) -> np.ndarray:
    """Hold a request as long as it may wait, then choose the first worker: a policy for tests."""
    cost = np.inf if request.may_wait_s > 0.0 else 0.0
    return np.full(len(fleet), cost)


class LateOnesFirst:
    """A policy that takes only requests that arrived at 30 s or later; at ticks after 100 s it asks
    for all held requests.
    """

    def initial_state(self) -> float:
        return 0.0

    def observe(self, fact: Fact, state: float) -> float:
        return fact.now_s if isinstance(fact, Tick) else 0.0

    def asks_held(self, state: float) -> bool:
        if state > 200.0:
            raise RuntimeError("it fails")
        return state > 100.0

    def costs(self, request: RequestView, fleet: FleetView, state: float) -> np.ndarray:
        late = request.now_s - request.held_s >= 30.0 and request.now_s > 100.0
        return np.full(len(fleet), 0.0 if late else np.inf)


HOLD = f"{__name__}:never"
LATE_FIRST = f"{__name__}:LateOnesFirst"
AT_LAST = f"{__name__}:at_last"
ONE_EACH = f"{__name__}:below_two"


def test_held_requests_are_retried_in_order_when_room_appears() -> None:
    world = World(workers=1, policy=ONE_EACH)
    first, low, high = (world.arrival([i], priority=p) for i, p in ((1, 0), (2, 5), (3, -5)))
    assert isinstance(world.core.on_arrival(first)[0], Dispatch)
    assert isinstance(world.core.on_arrival(low)[0], Hold)
    assert isinstance(world.core.on_arrival(high)[0], Hold)
    (action,) = world.core.on_finish(Finish(1.0, first.request_id))
    assert isinstance(action, Dispatch)
    assert action.request_id == high.request_id
    assert action.decision.reason == "held"
    assert world.core.held_requests == 1


@pytest.mark.parametrize("policy", [LATE_FIRST, f"{LATE_FIRST}|thresholds?max_requests=64"])
def test_a_policy_that_orders_held_requests_gets_all_of_them(policy: str) -> None:
    world = World(workers=1, policy=policy, hold_s=1_000.0)
    for number in range(12):
        world.core.on_arrival(world.arrival([number], now_s=float(number)))
    late = world.arrival([99], now_s=30.0)
    world.core.on_arrival(late)
    assert world.core.on_tick(Tick(99.0)) == []
    (action,) = world.core.on_tick(Tick(101.0))
    assert isinstance(action, Dispatch)
    assert action.request_id == late.request_id
    assert world.core.held_requests == 12
    with pytest.raises(PolicyError, match="it fails"):
        world.core.on_tick(Tick(201.0))


def test_an_answer_to_a_held_request_is_an_error() -> None:
    world = World(workers=1, policy=ONE_EACH)
    world.core.on_arrival(world.arrival([1]))
    held = world.arrival([2])
    world.core.on_arrival(held)
    with pytest.raises(AssertionError, match="while it was held"):
        world.core.on_finish(Finish(1.0, held.request_id))


def test_held_requests_are_bounded_in_number_and_time() -> None:
    world = World(policy=HOLD, hold_requests=2, hold_s=5.0)
    actions = [world.core.on_arrival(world.arrival([i]))[0] for i in range(3)]
    assert [type(a) for a in actions] == [Hold, Hold, Reject]
    assert actions[2].code == "hold_queue_full"
    late = world.core.on_tick(Tick(6.0))
    assert [a.code for a in late] == ["hold_timeout", "hold_timeout"]
    assert world.core.inflight_requests == 0


def test_a_held_request_is_retried_a_last_time_at_its_deadline() -> None:
    """A held request is offered to the policy one last time at its deadline, but not if its client
    no longer wants the answer.
    """
    world = World(workers=1, policy=AT_LAST, hold_s=5.0)
    core = world.core
    early, brief, late = (
        world.arrival([1]),
        world.arrival([2], hold_s=2.0),
        world.arrival([3], deadline_s=4.0),
    )
    for arrival in (early, brief, late):
        assert isinstance(core.on_arrival(arrival)[0], Hold)
    (sent,) = core.on_tick(Tick(2.0))
    assert isinstance(sent, Dispatch)
    assert (sent.request_id, sent.decision.reason) == (brief.request_id, "held")
    (gone,) = core.on_tick(Tick(4.5))
    assert isinstance(gone, Reject)
    assert (gone.request_id, gone.code) == (late.request_id, "deadline_exceeded")
    (sent,) = core.on_tick(Tick(5.0))
    assert isinstance(sent, Dispatch)
    assert sent.request_id == early.request_id
    assert (core.held_requests, core.inflight_requests) == (0, 2)
    for request_id in (early.request_id, brief.request_id):
        core.on_finish(Finish(6.0, request_id))
    assert core.inflight_requests == 0
    assert int(core.columns.requests.sum()) == 0


@given(places=st.integers(5, 30), mean_s=st.floats(0.5, 10.0), seed=st.integers(0, 1_000))
def test_retry_after_estimates_the_wait_of_a_request_that_joins_the_queue(
    places: int, mean_s: float, seed: int
) -> None:
    """A refusal says how long a request that joins the queue would wait: answers of different
    lengths end one at a time, and each end lets a waiting request in.
    """
    rng = np.random.default_rng(seed)
    world = World(workers=1, policy=ONE_EACH, hold_requests=places, hold_s=1e6)
    core = world.core

    def arrive() -> list[Action]:
        arrival = world.arrival(rng.integers(1, 99, rng.integers(1, 9)).tolist())
        return core.on_arrival(arrival)

    def answer(running: int) -> int:
        """End a request, and return the id of the next one."""
        # Where few wait, answers that differ more are forecast twofold wrong by chance alone.
        world.now_s += float(rng.uniform(0.6, 1.4)) * mean_s
        (action,) = core.on_finish(Finish(world.now_s, running))
        assert isinstance(action, Dispatch)
        return action.request_id

    running = world.next_id
    arrive()
    for _ in range(places):
        arrive()
    for _ in range(2 * places):
        running = answer(running)
        arrive()
    (reject,) = arrive()
    assert isinstance(reject, Reject)
    assert reject.retry_after_s is not None
    began_s = world.now_s
    for _ in range(places):  # then whoever had joined would be let in as the last one ends
        running = answer(running)
    waited_s = world.now_s - began_s + mean_s
    assert 0.55 <= reject.retry_after_s / min(waited_s, 600.0) <= 1.6


def test_a_wait_is_counted_once_when_it_ends() -> None:
    world = World(workers=1, policy=ONE_EACH, hold_s=5.0)
    first, sent, left, late = (world.arrival([i]) for i in range(4))
    for arrival in (first, sent, left, late):
        world.core.on_arrival(arrival)
    new = world.core.counters.held["new"]
    assert new.buckets()[-1] == ("+Inf", 0)
    world.core.on_failure(Failure(0.2, left.request_id, "client"))
    world.core.on_finish(Finish(1.0, first.request_id))
    world.core.on_tick(Tick(6.0))
    assert dict(new.buckets()) == {
        "0.05": 0, "0.25": 1, "1": 2, "2.5": 2, "5": 2,
        **dict.fromkeys(("10", "25", "50", "100", "250", "1000", "+Inf"), 3),
    }  # fmt: skip
    assert new.sum_s == pytest.approx(0.2 + 1.0 + 6.0)
    world.core.on_finish(Finish(7.0, sent.request_id))
    refused = World(policy=HOLD, hold_requests=0)
    assert isinstance(refused.core.on_arrival(refused.arrival([1]))[0], Reject)
    assert [t.sum_s for t in refused.core.counters.held.values()] == [0.0] * 3
    assert sum(sum(t.counts) for t in refused.core.counters.held.values()) == 0


@given(st.lists(st.floats(-1.0, 1e5, allow_nan=False), max_size=30))
def test_buckets_of_waits_equal_a_plain_count(waits: list[float]) -> None:
    times = HeldTimes()
    for wait_s in waits:
        times.add(wait_s)
    clipped = [max(wait_s, 0.0) for wait_s in waits]
    for name, count in times.buckets():
        assert count == sum(wait_s <= float(name) for wait_s in clipped)
    assert times.sum_s == pytest.approx(sum(clipped))


@pytest.mark.parametrize("policy", ["hybrid", "kv_prefix", "power_of_two", "round_robin"])
def test_no_worker_exceeds_its_request_limit_under_any_policy(policy: str) -> None:
    world = World(workers=2, policy=policy, worker_requests=2)
    arrivals = [world.arrival([1, 2, 3]) for _ in range(6)]
    sent = [world.core.on_arrival(arrival)[0] for arrival in arrivals]
    assert [type(action) for action in sent] == [Dispatch] * 4 + [Hold] * 2
    by_worker = Counter(action.worker_id for action in sent[:4])
    assert by_worker == {0: 2, 1: 2}
    (action,) = world.core.on_finish(Finish(1.0, arrivals[0].request_id))
    assert isinstance(action, Dispatch)
    assert action.request_id == arrivals[4].request_id
    assert action.worker_id == sent[0].worker_id
    assert world.core.held_requests == 1


def test_uncomputed_prompts_count_against_the_limit_until_their_first_token() -> None:
    world = World(workers=1, worker_queued_tokens=3 * BLOCK)
    large, small, late = world.arrival([1, 2, 3]), world.arrival([4]), world.arrival([5])
    assert isinstance(world.core.on_arrival(large)[0], Dispatch)
    assert isinstance(world.core.on_arrival(small)[0], Hold)
    world.core.on_first_token(FirstToken(0.0, large.request_id))
    actions = world.core.on_arrival(late)
    assert {type(action) for action in actions} == {Dispatch}
    assert {action.request_id for action in actions} == {small.request_id, late.request_id}
