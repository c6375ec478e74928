"""Tests of the order of the hold queue: urgent requests first, then sessions that have begun, then
the oldest.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import Standing
from policies.facts import Arrival
from router.core.placement.hold_queue import HoldQueue
from router.core.placement.pending import Pending
from tests.router.property_support import patient

WAITING = st.lists(
    st.tuples(
        st.integers(-1, 1),  # priority
        st.sampled_from(("new", "cold", "warm")),
        st.sampled_from(("m", "n")),
        st.floats(0.0, 100.0),  # when it came
        st.booleans(),  # whether a worker takes it when it is asked
    ),
    max_size=40,
)
NOW_S = 100.0


def waits(
    serial: int,
    priority: int = 0,
    standing: Standing = "new",
    model: str = "m",
    at_s: float = 0.0,
    tenant: str | None = None,
) -> Pending:
    fact = Arrival(at_s, serial, model, 1, {}, priority=priority, tenant=tenant)
    return Pending(fact, serial, 0.0, standing=standing)


def serve(queue: HoldQueue, pending: Pending) -> None:
    queue.served(pending)
    queue.remove(pending)


@patient
@given(WAITING)
def test_held_requests_are_retried_in_order_until_a_few_cannot_be_placed(
    requests: list[tuple[int, Standing, str, float, bool]],
) -> None:
    queue = HoldQueue(100)
    made = [
        (waits(n, priority, standing, model, at_s), takes)
        for n, (priority, standing, model, at_s, takes) in enumerate(requests)
    ]
    taken = {pending.serial for pending, takes in made if takes}
    for pending, _ in made:
        queue.add(pending)
    again = random.Random(len(made)).sample([pending for pending, _ in made], len(made) // 2)
    for pending in again:  # one that waits again has its old place
        queue.remove(pending)
    for pending in again:
        queue.add(pending)
    retried = []
    for pending in queue.sweep(NOW_S):
        retried.append(pending.serial)
        if pending.serial in taken:
            queue.remove(pending)
    expected = []
    refused = {"m": 0, "n": 0}
    order = sorted(
        (pending for pending, _ in made),
        key=lambda p: (p.arrival.priority, p.standing == "new", p.serial),
    )
    for pending in order:
        model = pending.arrival.model
        if refused[model] < 8:
            expected.append(pending.serial)
            if pending.serial not in taken:
                # One that has waited for more than 20 s is passed by nobody of its model.
                refused[model] += 8 if NOW_S - pending.arrival.now_s > 20.0 else 1
    assert retried == expected
    assert len(queue) == len(made) - len(taken & set(retried))


@pytest.mark.parametrize(("waited_s", "passed"), [(20.0, 1), (20.5, 0)])
def test_a_head_that_has_waited_long_is_not_overtaken(waited_s: float, passed: int) -> None:
    queue = HoldQueue(10)
    queue.add(waits(0, standing="cold", at_s=0.0))
    queue.add(waits(1, at_s=waited_s))
    assert len(list(queue.sweep(waited_s))) == 1 + passed


def test_held_requests_are_counted_by_standing() -> None:
    queue = HoldQueue(10)
    for serial, standing in enumerate(("new", "cold", "new")):
        queue.add(waits(serial, standing=standing))  # type: ignore[arg-type]
    assert queue.standings() == {"new": 2, "cold": 1}


def test_a_first_request_does_not_wait_behind_a_hundred_of_another_tenant() -> None:
    queue = HoldQueue(1_000)
    crowd = [waits(serial, tenant="crowd") for serial in range(100)]
    alone = [waits(serial, tenant="alone") for serial in range(100, 103)]
    for one in [*crowd, *alone]:
        queue.add(one)
    order = list(queue.sweep(0.0))[:1]
    assert order == crowd[:1]
    for one in order:
        serve(queue, one)
    taken = []
    for _ in range(6):
        first = next(queue.sweep(0.0))
        serve(queue, first)
        taken.append(first.arrival.tenant)
    assert taken == ["alone", "crowd", "alone", "crowd", "alone", "crowd"]


def test_a_tenant_gets_no_credit_for_the_time_before_its_first_request() -> None:
    queue = HoldQueue(1_000)
    for serial in range(10):
        queue.add(waits(serial, tenant="a"))
    for _ in range(8):
        serve(queue, next(queue.sweep(0.0)))
    for serial in range(10, 14):
        queue.add(waits(serial, tenant="b"))
    taken = []
    while len(queue):
        first = next(queue.sweep(0.0))
        serve(queue, first)
        taken.append(first.arrival.tenant)
    assert taken == ["b", "a", "b", "a", "b", "b"]


def test_all_held_requests_are_retried_if_the_policy_orders_them() -> None:
    queue = HoldQueue(100)
    for serial in range(30):
        queue.add(waits(serial, at_s=0.0 if serial < 3 else NOW_S))
    assert [pending.serial for pending in queue.sweep(NOW_S)] == [0], "it has waited for long"
    assert [pending.serial for pending in queue.sweep(1.0)] == list(range(8))
    assert [pending.serial for pending in queue.sweep(NOW_S, math.inf)] == list(range(30))
