"""Tests of fairness within a tenant, between the users whose agents' requests wait."""

from __future__ import annotations

from bisect import insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Arrival, Identity
from router.core.placement.group_turns import _REMEMBERED_MAX, GroupTurns, group_of
from router.core.placement.hold_queue import HoldQueue
from router.core.placement.pending import Pending
from tests.router.property_support import patient


class Line:
    """The waiting requests of a tenant, in the order of their start tags."""

    def __init__(self) -> None:
        self.turns = GroupTurns()
        self.waiting: list[tuple[float, int, str | None, float]] = []
        self.serial = 0

    def add(self, group: str | None, work: float) -> None:
        insort(self.waiting, (self.turns.begins(group, work), self.serial, group, work))
        self.serial += 1

    def serve(self) -> tuple[str | None, float]:
        _, _, group, work = self.waiting.pop(0)
        self.turns.served(group, work, waited=True)
        self.turns.ends(group)
        return group, work


def test_many_sub_agents_of_one_user_do_not_delay_other_users() -> None:
    line = Line()
    for _ in range(30):
        line.add("ann", 10_000.0)
    line.add("ben", 10_000.0)
    line.add("cleo", 500.0)
    assert [line.serve()[0] for _ in range(4)] == ["ann", "ben", "cleo", "ann"]


@patient
@given(st.lists(st.floats(1.0, 1e5), max_size=30), st.integers(0, 10))
def test_requests_without_a_group_keep_their_order(works: list[float], served: int) -> None:
    line = Line()
    order = []
    for number, work in enumerate(works):
        line.add(None, work)
        if number % 3 == 2 and served:
            order.append(line.waiting[0][1])
            line.serve()
    while line.waiting:
        order.append(line.waiting[0][1])
        line.serve()
    assert order == sorted(order)


@patient
@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.lists(st.floats(1.0, 1e4), min_size=1, max_size=20), min_size=2
    )
)
def test_groups_that_wait_together_get_equal_work_up_to_a_request(
    groups: dict[str, list[float]],
) -> None:
    """Two groups that both wait get the same work up to one request of each, the bound of
    start-time fair queueing.
    """
    line = Line()
    for group, works in groups.items():
        for work in works:
            line.add(group, work)
    done = dict.fromkeys(groups, 0.0)
    left = {group: len(works) for group, works in groups.items()}
    while line.waiting:
        group, work = line.serve()
        assert group is not None
        done[group] += work
        left[group] -= 1
        together = [one for one, count in left.items() if count]
        for one in together:
            for other in together:
                bound = max(groups[one]) + max(groups[other])
                assert done[one] - done[other] <= bound * (1 + 1e-9)


@patient
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 100.0)), max_size=60))
def test_few_later_requests_overtake_a_waiting_request(
    later: list[tuple[str, float]],
) -> None:
    """A waiting request is served before later ones have had more than their queue's
    share of work.
    """
    line = Line()
    for _ in range(3):
        line.add("first", 100.0)
    for number, (group, work) in enumerate(later):
        line.add(group, work)
        if number % 2:
            line.serve()
    own = [serial for _, serial, group, _ in line.waiting if group == "first"]
    passed = [w for _, s, g, w in line.waiting if own and s > own[-1] and g != "first"]
    before = 0.0
    while own and line.waiting and line.waiting[0][1] != own[-1]:
        _, work = line.serve()
        before += work
    # Three groups besides, each at most what "first" has had and one request more.
    assert before <= 3 * (300.0 + 100.0) + 300.0
    assert len(passed) <= len(later)


def test_unqueued_work_counts_for_its_group() -> None:
    line = Line()
    line.add("ben", 10.0)
    line.turns.served("ann", 1_000.0, waited=False)
    line.add("ann", 10.0)
    line.add("cleo", 10.0)
    assert [line.serve()[0] for _ in range(3)] == ["ben", "cleo", "ann"]


def test_the_number_of_remembered_groups_is_bounded() -> None:
    turns = GroupTurns()
    turns.begins("stays", 5.0)
    for number in range(3 * _REMEMBERED_MAX):
        turns.served(f"g{number}", 1e9, waited=False)
        assert len(turns._finish) <= _REMEMBERED_MAX + 2
    assert "stays" in turns._finish


@pytest.mark.parametrize(
    ("identity", "group"),
    [
        (Identity(group="g", cache_group="k", user="u"), "g"),
        (Identity(cache_group="k", user="u"), "k"),
        (Identity(user="u"), "u"),
        (Identity(parent="p"), None),
    ],
)
def test_the_group_of_a_request_follows_from_its_identity(
    identity: Identity, group: str | None
) -> None:
    assert group_of(arrival(0, identity=identity)) == group


def arrival(number: int, **fields: object) -> Arrival:
    known = {"now_s": 0.0, "request_id": number, "model": "m", "prompt_tokens": 10, "chains": {}}
    return Arrival(**known | fields)  # type: ignore[arg-type]


@patient
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "add", "sent", "left", "passes")),
            st.sampled_from((None, "a", "b")),
            st.sampled_from((None, "t", "u")),
            st.integers(0, 1),
        ),
        max_size=60,
    )
)
def test_the_hold_queue_drops_a_group_with_its_last_request(
    steps: list[tuple[str, str | None, str | None, int]],
) -> None:
    queue = HoldQueue(1_000)
    for number, (step, group, tenant, priority) in enumerate(steps):
        fact = arrival(number, identity=Identity(group=group), tenant=tenant, priority=priority)
        pending = Pending(fact, number, 0.0, work_tokens=10.0)
        waiting = list(queue)
        if step == "add":
            queue.add(pending)
        elif step == "passes":
            queue.served(pending)
        elif waiting:
            one = waiting[number % len(waiting)]
            if step == "sent":
                queue.served(one)
            queue.remove(one)
        lines = {(one.arrival.priority, one.arrival.tenant) for one in queue}
        assert queue._groups.keys() == lines
    for one in list(queue):
        queue.remove(one)
    assert not queue._groups
