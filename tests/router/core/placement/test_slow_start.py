"""Tests of slow start: a worker that joins a running pool gets its share of requests gradually."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import FleetView, Floats, RequestView
from policies.facts import WorkerChange, WorkerFacts
from router.core.contract.actions import Dispatch
from router.core.placement.eligible import Rows
from router.core.placement.health import SlowStart
from tests.router.core.core_world import BLOCK, World

RAMP_S = 10.0


def world(*joined_s: float, policy: str = "least_requests", slow_start_s: float = RAMP_S) -> World:
    """Return a world with one worker for each of the given join times."""
    one = World(workers=0, policy=policy, slow_start_s=slow_start_s)
    for worker_id, at_s in enumerate(joined_s):
        join(one, worker_id, at_s)
    return one


def join(one: World, worker_id: int, at_s: float, model: str = "m") -> None:
    facts = WorkerFacts(f"w{worker_id}", (model,), BLOCK)
    one.core.on_worker(WorkerChange(at_s, worker_id, "ready", facts))


def one_each(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Exclude the workers that have a request: a policy for tests."""
    return np.where(fleet.requests > 0, np.inf, 0.0)


def sent(one: World, prompt: int) -> int:
    """Send a request with a prompt that no other has; return its worker. The request must not be
    held.
    """
    (action,) = one.core.on_arrival(one.arrival([prompt, prompt]))
    assert isinstance(action, Dispatch)
    return action.stages[0].worker_id


def rows_of(one: World) -> Rows:
    return Rows.of(one.core.workers)


def starting(one: World) -> set[int]:
    slow_start = one.core.caches.slow_start
    return {w.worker_id for w in one.core.workers if slow_start.share(w.worker_id, 1e-9) < 1.0}


def test_only_workers_that_join_a_long_running_pool_start_slowly() -> None:
    assert starting(world(0.0, 0.1, 9.9)) == set()  # a pool that starts
    assert starting(world(0.0, 10.0)) == {1}
    assert starting(world(0.0, 10.0, slow_start_s=0.0)) == set()
    other = world(0.0)
    join(other, 1, 50.0, model="another")
    assert starting(other) == set()


def test_down_or_draining_workers_do_not_make_a_running_pool() -> None:
    for state in "down", "draining":
        one = world(0.0)
        one.core.on_worker(WorkerChange(1.0, 0, state))
        join(one, 1, 50.0)
        assert starting(one) == set()


@given(st.integers(0, 10**9), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_the_share_of_a_starting_worker_grows_linearly(first: int, share: float) -> None:
    one = world(0.0, 20.0)
    slow_start, rows = one.core.caches.slow_start, rows_of(one)
    hits = np.zeros(2, np.int64)
    now_s = 20.0 + share * RAMP_S
    let_in = sum(len(slow_start.rows(first + n, rows, hits, now_s)) == 2 for n in range(1_000))
    assert let_in == pytest.approx(1_000 * share, abs=5)


def test_slow_start_ends_and_its_record_is_removed() -> None:
    one = world(0.0, 20.0)
    slow_start, rows = one.core.caches.slow_start, rows_of(one)
    hits = np.zeros(2, np.int64)
    assert slow_start.rows(0, rows, hits, 30.0) is rows
    assert len(slow_start) == 0
    two = world(0.0, 20.0)
    two.core.on_worker(WorkerChange(21.0, 1, "gone"))
    assert len(two.core.caches.slow_start) == 0


def test_slow_start_does_not_limit_prompts_cached_best_at_the_worker() -> None:
    one = world(0.0, 20.0)
    slow_start, rows = one.core.caches.slow_start, rows_of(one)
    assert slow_start.rows(0, rows, np.array([8, 16]), 20.0) is rows
    assert slow_start.rows(0, rows, np.array([16, 16]), 20.0).worker_ids == (0,)
    assert slow_start.rows(0, rows, np.array([16, 8]), 20.0).worker_ids == (0,)


def test_a_starting_worker_takes_all_requests_if_others_are_down() -> None:
    one = world(0.0, 20.0, policy="least_requests")
    one.core.on_worker(WorkerChange(20.5, 0, "down"))
    one.now_s = 20.6
    assert {sent(one, n) for n in range(20)} == {1}


def test_starting_workers_take_all_requests_if_there_are_no_others() -> None:
    one = world(0.0, 20.0, 20.0)
    slow_start = one.core.caches.slow_start
    assert len(slow_start) == 2
    rows = Rows.of([w for w in one.core.workers if w.worker_id])
    assert slow_start.rows(0, rows, np.zeros(2, np.int64), 20.0) is rows


def test_a_starting_worker_is_eligible_if_the_request_would_be_held() -> None:
    """A request goes to a worker in slow start if all other workers are full, instead of being
    held.
    """
    one = world(0.0, 20.0, policy=f"{__name__}:one_each")
    one.now_s = 20.0
    assert [sent(one, n) for n in range(2)] == [0, 1]


def test_a_burst_is_sent_mostly_to_running_workers() -> None:
    one = world(0.0)
    one.now_s = 20.0
    join(one, 1, 20.0)
    one.now_s = 21.0  # a tenth of its slow start
    chosen = [sent(one, n) for n in range(50)]
    assert chosen.count(1) == pytest.approx(5, abs=1)
    assert len(SlowStart(0.0)) == 0
