"""Tests of the fair queue: tenants take turns by work and weight, compared with deficit round
robin.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Arrival
from router.core.placement.hold_queue import FairQueue, HoldQueue
from router.core.placement.pending import Pending
from tests.router.property_support import patient


@dataclass(eq=False)
class Job:
    tenant: str
    turn: tuple[bool, int]
    work: float
    weight: float

    @property
    def fair_work(self) -> float:
        return self.work / self.weight


def serve_all(turns: FairQueue[Job], most: int) -> list[Job]:
    served = []
    while turns and len(served) < most:
        job = next(turns.in_turn(lambda job: False))
        turns.served(job.tenant, job.fair_work, True)
        turns.remove(job.tenant, job)
        served.append(job)
    return served


def deficit_round_robin(lines: dict[str, deque[Job]], quantum: float) -> list[Job]:
    """Return the order of deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), in plain
    code.
    """
    served: list[Job] = []
    deficits = dict.fromkeys(lines, 0.0)
    while any(lines.values()):
        for tenant, line in lines.items():
            if not line:
                continue
            deficits[tenant] += quantum * line[0].weight
            while line and line[0].work <= deficits[tenant]:
                job = line.popleft()
                deficits[tenant] -= job.work
                served.append(job)
            if not line:
                deficits[tenant] = 0.0
    return served


TENANTS = st.dictionaries(
    st.sampled_from("abcde"),
    st.tuples(st.floats(0.1, 10.0), st.lists(st.floats(1.0, 100.0), min_size=1, max_size=30)),
    min_size=1,
)


def jobs_of(tenants: dict[str, tuple[float, list[float]]]) -> list[Job]:
    serial = iter(range(10_000))
    return [
        Job(tenant, (False, next(serial)), work, weight)
        for tenant, (weight, works) in tenants.items()
        for work in works
    ]


@patient
@given(TENANTS)
def test_shares_equal_deficit_round_robin_up_to_a_request_or_two(tenants) -> None:
    """The shares of tenants equal those of deficit round robin up to a request or two: while two
    tenants both wait, their work over weight differs by at most one request each.
    """
    jobs = jobs_of(tenants)
    turns: FairQueue[Job] = FairQueue()
    lines: dict[str, deque[Job]] = {}
    for job in jobs:
        turns.add(job.tenant, job)
        lines.setdefault(job.tenant, deque()).append(job)
    quantum = 100.0 / min(weight for weight, _ in tenants.values())
    oracle = deficit_round_robin(lines, quantum)
    served = serve_all(turns, len(jobs))
    assert Counter(map(id, served)) == Counter(map(id, oracle))  # everybody, once
    largest = {t: max(works) / weight for t, (weight, works) in tenants.items()}
    for order, slack in ((served, 1.0), (oracle, None)):
        done = dict.fromkeys(tenants, 0.0)
        left = {t: len(works) for t, (_, works) in tenants.items()}
        for job in order:
            done[job.tenant] += job.fair_work
            left[job.tenant] -= 1
            waiting = [t for t, n in left.items() if n]
            for one in waiting:
                for other in waiting:
                    bound = largest[one] + largest[other]
                    if slack is None:  # the oracle's rounds are coarser than ours
                        bound += 2 * quantum
                    assert done[one] - done[other] <= bound * (1 + 1e-9)


@patient
@given(TENANTS, st.lists(st.sampled_from(("add", "add", "serve", "leave")), max_size=100))
def test_requests_of_a_tenant_keep_their_order(tenants, steps) -> None:
    turns: FairQueue[Job] = FairQueue()
    waiting: list[Job] = []
    to_come = deque(jobs_of(tenants))
    for number, step in enumerate(steps):
        if step == "add" and to_come:
            waiting.append(job := to_come.popleft())
            turns.add(job.tenant, job)
        elif step == "serve" and waiting:
            (job,) = serve_all(turns, 1)
            assert job.turn == min(one.turn for one in waiting if one.tenant == job.tenant)
            waiting.remove(job)
        elif step == "leave" and waiting:
            job = waiting.pop(number * 7 % len(waiting))
            turns.remove(job.tenant, job)
        assert sorted(map(id, turns)) == sorted(map(id, waiting))
        assert len(list(turns.in_turn(lambda job: False))) == len(waiting)


def test_unqueued_work_counts_and_an_absent_tenant_earns_no_credit() -> None:
    turns: FairQueue[Job] = FairQueue()
    for serial in range(20):
        turns.add("a", Job("a", (False, serial), 1.0, 1.0))
    serve_all(turns, 10)
    for serial in range(20, 30):
        turns.add("b", Job("b", (False, serial), 1.0, 1.0))
    turns.served("b", 4.0, False)  # four of b found room by themselves
    assert [job.tenant for job in serve_all(turns, 8)] == ["a", "a", "a", "a", "b", "a", "b", "a"]


def pending(serial: int, tenant: str, weight: float = 1.0, priority: int = 0) -> Pending:
    fact = Arrival(0.0, serial, "m", 1, {}, tenant=tenant, weight=weight, priority=priority)
    return Pending(fact, serial, 0.0)


@pytest.mark.parametrize("weights", [(1.0, 3.0), (3.0, 1.0), (0.5, 2.0)])
def test_a_flooding_tenant_does_not_take_the_share_of_another_tenant(weights) -> None:
    """A tenant that floods a full queue does not take others' shares: served work follows the
    weights within a tenth, although one tenant sends ten times as much.
    """
    queue = HoldQueue(64)
    done: Counter[str] = Counter()
    serial = 0
    for step in range(4_000):
        # The crowd sends ten for each of the other's; the pool takes one.
        for tenant, weight, count in (("crowd", weights[0], 10), ("other", weights[1], 1)):
            for _ in range(count):
                one = pending(serial, tenant, weight)
                one.work_tokens = 50.0 + 37 * (serial % 5)
                serial += 1
                if queue.full:
                    victim = queue.victim(one.arrival)
                    if victim is None:
                        continue
                    queue.remove(victim)
                queue.add(one)
        first = next(queue.sweep(0.0))
        queue.served(first)
        queue.remove(first)
        if step > 100:
            done[first.arrival.tenant] += int(first.work_tokens)
    share = done["other"] / done["crowd"]
    assert share == pytest.approx(weights[1] / weights[0], rel=0.1)


def test_the_newest_of_the_least_urgent_requests_is_displaced() -> None:
    queue = HoldQueue(10)
    for serial, priority in enumerate((0, 5, 5, 2)):
        queue.add(pending(serial, "a", priority=priority))
    assert (victim := queue.victim(pending(9, "b", priority=3).arrival)) is not None
    assert victim.serial == 2
    assert queue.victim(pending(9, "b", priority=6).arrival) is None
    # Of one priority, who has more for its weight: a has two, b would have one.
    assert (victim := queue.victim(pending(9, "b", priority=5).arrival)) is not None
    assert victim.serial == 2
    assert queue.victim(pending(9, "b", weight=0.5, priority=5).arrival) is None
    assert queue.victim(pending(9, "a", priority=5).arrival) is None


def test_work_before_an_arrival_counts_urgent_work_and_its_fair_share() -> None:
    queue = HoldQueue(10)
    for serial, (tenant, priority) in enumerate((("a", -1), ("a", 0), ("a", 0), ("b", 0))):
        one = pending(serial, tenant, priority=priority)
        one.work_tokens = 100.0
        queue.add(one)

    def before(tenant: str, priority: int = 0, begun: bool = False) -> float:
        return queue.work_before(pending(9, tenant, priority=priority).arrival, begun)

    assert before("a", -2) == 0.0
    assert before("a", -1) == 100.0
    assert before("a") == 400.0
    assert before("b") == 300.0  # a's turns between b's own
    assert before("c") == 100.0  # its first turn comes at once
    assert before("c", 1) == 400.0
    assert before("a", begun=True) == 0.0, "sessions that have begun wait in lines of their own"
