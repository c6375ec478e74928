"""Tests of admission: which requests are held or refused, and that refusals give a correct time for
another try.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import FleetView, RequestView
from policies.facts import Failure, Finish, FirstToken, Tick
from router.core.contract.actions import Action, Dispatch, Hold, Reject
from router.core.placement.admission import Drain
from tests.router.core.core_world import BLOCK, World
from tests.router.property_support import patient


def one_each(request: RequestView, fleet: FleetView, state: object) -> np.ndarray:
    """Hold a request unless some worker has no request: a policy for tests."""
    return np.where(fleet.requests < 1, fleet.requests.astype(float), np.inf)


ONE_EACH = f"{__name__}:one_each"


def full(limit: int = 2, **settings: object) -> World:
    """Return a world with one busy worker and a hold queue of `limit` places."""
    world = World(workers=1, policy=ONE_EACH, hold_requests=limit, **settings)
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    return world


def kinds_of(actions: list[Action]) -> list[tuple[str, int]]:
    """Return the kind of each action that is about a request, and the request's id."""
    about = [a for a in actions if isinstance(a, (Dispatch, Hold, Reject))]
    return [(a.code if isinstance(a, Reject) else type(a).__name__, a.request_id) for a in about]


def test_an_urgent_request_displaces_the_newest_least_urgent_held_request() -> None:
    world = full()
    core = world.core
    older, newer = world.arrival([2], priority=5), world.arrival([3], priority=5)
    for arrival in (older, newer):
        assert isinstance(core.on_arrival(arrival)[0], Hold)
    urgent = world.arrival([4], priority=1)
    assert kinds_of(core.on_arrival(urgent)) == [
        ("displaced", newer.request_id),
        ("Hold", urgent.request_id),
    ]
    same, less = world.arrival([5], priority=5), world.arrival([6], priority=9)
    assert kinds_of(core.on_arrival(same)) == [("hold_queue_full", same.request_id)]
    assert kinds_of(core.on_arrival(less)) == [("hold_queue_full", less.request_id)]
    assert core.held.requests() == [urgent.request_id, older.request_id]
    assert core.counters.rejections == {"displaced": 1, "hold_queue_full": 2}
    assert core.inflight_requests == 3


@pytest.mark.parametrize("limit", [{"inflight_requests": 3}, {"queued_tokens": 3 * BLOCK}])
def test_a_router_at_its_limit_makes_room_only_for_more_urgent_requests(limit) -> None:
    world = full(9, **limit)
    core = world.core
    held = [world.arrival([2], priority=5), world.arrival([3], priority=5)]
    for arrival in held:
        assert isinstance(core.on_arrival(arrival)[0], Hold)
    same = world.arrival([4], priority=5)
    assert kinds_of(core.on_arrival(same)) == [("router_full", same.request_id)]
    urgent = world.arrival([4], priority=0)
    assert kinds_of(core.on_arrival(urgent)) == [
        ("displaced", held[1].request_id),
        ("Hold", urgent.request_id),
    ]


def test_tokens_count_as_queued_until_they_are_computed_or_cancelled() -> None:
    world = World(workers=1, policy=ONE_EACH, queued_tokens=4 * BLOCK)
    core = world.core
    first, second, third = (world.arrival([n] * 3) for n in (1, 2, 3))
    assert kinds_of(core.on_arrival(first)) == [("Dispatch", first.request_id)]
    assert kinds_of(core.on_arrival(second)) == [("Hold", second.request_id)]
    assert core.admission.drain.queued_tokens == core.held.tokens == 3 * BLOCK
    assert kinds_of(core.on_arrival(third)) == [("router_full", third.request_id)]
    core.on_first_token(FirstToken(1.0, first.request_id))
    assert core.admission.drain.queued_tokens == 0
    fourth = world.arrival([1, 1, 1, 4], now_s=1.0)
    assert kinds_of(core.on_arrival(fourth)) == [("Hold", fourth.request_id)]
    # What a worker has in its cache is nobody's work: one block and the last token's.
    assert core.held.tokens == 3 * BLOCK + BLOCK


def test_retry_after_is_the_time_that_the_pool_needs_for_its_queue() -> None:
    world = full(100)
    core = world.core
    request_id, now_s = 1, 0.0
    # 400 tokens a second, for long enough to be believed.
    for number in range(60):
        following = world.arrival([100 + number] * 10, now_s=now_s)
        assert kinds_of(core.on_arrival(following)) == [("Hold", following.request_id)]
        now_s += 0.1
        core.on_first_token(FirstToken(now_s, request_id))
        (action,) = core.on_finish(Finish(now_s, request_id, output_tokens=10))
        assert isinstance(action, Dispatch)
        request_id = following.request_id
    assert core.admission.drain.rate("m", now_s) == pytest.approx(400.0, rel=0.1)
    for number in range(100):
        core.on_arrival(world.arrival([300 + number] * 10, now_s=now_s))
    (refused,) = core.on_arrival(world.arrival([999], now_s=now_s))
    assert isinstance(refused, Reject)
    assert refused.code == "hold_queue_full"
    # 100 wait before it, 0.1 s each. The first of those let in were taken for longer answers.
    assert refused.retry_after_s == pytest.approx(10.0, rel=0.3)
    # A tenant of its own would have waited for nobody but the one that is being computed.
    (urgent,) = [
        core.admission.wait_s(world.arrival([9], priority=-1, now_s=now_s), now_s) for _ in "1"
    ]
    assert urgent == pytest.approx(0.1, rel=0.1)


def test_retry_after_uses_calibrated_rates_before_any_measurement() -> None:
    world = full(0)
    (refused,) = world.core.on_arrival(world.arrival([2]))
    assert isinstance(refused, Reject)
    assert refused.retry_after_s == 1.0  # 4 tokens at 15,000 a second, and never less than this
    rate = float(world.core.columns.prefill_tokens_per_s[0])
    world.core.admission.drain.sent("m", 100 * int(rate), 0.0)
    (refused,) = world.core.on_arrival(world.arrival([3]))
    assert isinstance(refused, Reject)
    assert refused.retry_after_s == pytest.approx(100.0, rel=0.01)


@patient
@given(st.floats(200.0, 1e5), st.integers(1, 50), st.floats(0.0, 1e4))
def test_the_drain_rate_is_measured_over_busy_times_only(
    rate: float, tokens: int, pause_s: float
) -> None:
    drain, now_s = Drain(), 0.0
    assert drain.rate("m", now_s) is None
    while now_s < 10.0:  # busy
        drain.sent("m", tokens, now_s)
        step_s = max(tokens / rate, 0.05)
        now_s += step_s
        drain.over("m", tokens, True, now_s)
    expected = tokens / step_s
    assert drain.rate("m", now_s) == pytest.approx(expected, rel=0.1)
    now_s += pause_s
    assert drain.rate("m", now_s) == pytest.approx(expected, rel=0.1)
    drain.sent("m", tokens, now_s)
    drain.over("m", tokens, False, now_s + 5.0)  # given up: time, and nothing computed
    found = drain.rate("m", now_s + 5.0)
    assert found is not None
    assert found < expected
    assert drain.queued_tokens == drain.queued_of("m") == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(("come", "first", "end", "fail", "leave", "tick")), st.integers(0)),
    max_size=120,
)


@patient
@given(STEPS)
def test_each_request_is_answered_once_and_all_counts_return_to_0(steps) -> None:
    world = World(
        workers=2, policy=ONE_EACH, hold_requests=4, inflight_requests=6, hold_s=8.0,
        queued_tokens=15 * BLOCK,
    )  # fmt: skip
    core = world.core
    open_ids: set[int] = set()
    running: set[int] = set()

    def check_answers(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    assert action.request_id in open_ids
                    running.add(action.request_id)
                case Reject():
                    open_ids.remove(action.request_id)  # each once
                    running.discard(action.request_id)
                    assert action.status != 503 or action.retry_after_s is not None

    for step, number in steps:
        world.now_s += 0.5
        picked = sorted(running)[number % len(running)] if running else None
        if step == "come":
            chance = random.Random(number)
            arrival = world.arrival(
                [number % 7] * (1 + number % 4), priority=number % 3, tenant=chance.choice("ab"),
                weight=chance.choice((0.5, 3.0)), stream=bool(number % 2), now_s=world.now_s,
            )  # fmt: skip
            open_ids.add(arrival.request_id)
            check_answers(core.on_arrival(arrival))
        elif step == "tick":
            check_answers(core.on_tick(Tick(world.now_s)))
        elif step == "leave" and open_ids:
            left = sorted(open_ids)[number % len(open_ids)]
            open_ids.remove(left)
            running.discard(left)
            check_answers(core.on_failure(Failure(world.now_s, left, "client")))
        elif picked is not None and step == "first":
            check_answers(core.on_first_token(FirstToken(world.now_s, picked)))
        elif picked is not None and step == "end":
            open_ids.remove(picked)
            running.discard(picked)
            check_answers(core.on_finish(Finish(world.now_s, picked, output_tokens=number % 50)))
        elif picked is not None and step == "fail":
            running.discard(picked)
            check_answers(core.on_failure(Failure(world.now_s, picked, "worker", True, "connect")))
        assert core.inflight_requests == len(open_ids) <= 6
        assert core.held_requests <= 4
        assert set(core.held.requests()) == open_ids - running
    check_answers(core.on_tick(Tick(world.now_s + 100.0)))  # those that wait have waited too long
    while open_ids:
        left = min(open_ids)
        open_ids.remove(left)
        check_answers(core.on_failure(Failure(world.now_s + 100.0, left, "client")))
    assert not open_ids
    assert core.inflight_requests == core.held_requests == len(core.ledger) == 0
    assert core.admission.drain.queued_tokens == core.held.tokens == 0
