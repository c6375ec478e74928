"""Tests of requests that workers still compute after their clients left: how long the router
charges them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, LoadReport, Progress, Tick, WorkerChange
from router.core.contract.actions import Cancel, Dispatch
from tests.router.core.core_world import BLOCK, World
from tests.router.property_support import patient

BLOCKS = list(range(100))
PROMPT = len(BLOCKS) * BLOCK
RATE, STEP_S = 1_000.0, 0.01
PREFILL_S = PROMPT / RATE
SPEEDS = {"prefill_tokens_per_s": RATE, "step_s": STEP_S, "has_events": False}


def world_of(workers: int = 1, **settings: object) -> World:
    world = World(workers=0, **settings)
    for worker_id in range(workers):
        world.join(worker_id, **SPEEDS)
    return world


def sent(world: World, **fields: object) -> int:
    arrival = world.arrival(BLOCKS, **fields)
    (dispatch,) = world.core.on_arrival(arrival)
    assert isinstance(dispatch, Dispatch)
    return arrival.request_id


def leave(world: World, number: int, at_s: float, runs_on: bool = True) -> None:
    world.now_s = at_s
    fact = Failure(at_s, number, "client", reason="client left", runs_on=runs_on)
    assert world.core.on_failure(fact) == []


def charged(world: World, at_s: float) -> int:
    """Return the number of requests charged to the first worker, after the core has seen
    the time.
    """
    world.now_s = at_s
    world.core.on_tick(Tick(at_s))
    return int(world.core.columns.requests[0])


def report(world: World, running: int, at_s: float, worker_id: int = 0) -> None:
    world.now_s = at_s
    world.core.on_load_report(LoadReport(at_s, worker_id, running, 0, float("nan")))


def assert_empty(world: World) -> None:
    columns = world.core.columns
    for name in ("requests", "waiting", "context_tokens", "decode_place_tokens"):
        assert not getattr(columns, name).any(), name
    assert np.array_equal(columns.charged_work, columns.drained_work)
    assert (columns.drain_limit_work == np.inf).all()
    assert world.core.is_quiet
    assert not len(world.core.leftovers)


def test_a_request_that_ends_with_its_client_is_released_at_once() -> None:
    world = world_of()
    leave(world, sent(world, max_output_tokens=100), 0.1, runs_on=False)
    assert_empty(world)


@pytest.mark.parametrize("stream", [True, False])
def test_a_leftover_in_prefill_is_charged_for_prefill_and_decode(stream: bool) -> None:
    world = world_of()
    number = sent(world, max_output_tokens=100, stream=stream)
    leave(world, number, 0.2)
    end_s = PREFILL_S + 100 * STEP_S
    assert charged(world, end_s - 0.01) == 1
    assert charged(world, end_s + 0.01) == 0
    assert_empty(world)


def test_a_leftover_in_decode_is_charged_for_its_remaining_tokens() -> None:
    world = world_of()
    number = sent(world, max_output_tokens=100)
    world.core.on_first_token(FirstToken(1.0, number))
    world.core.on_progress(Progress(1.0 + 39 * STEP_S, number, 40))
    step_s = float(world.core.columns.step_s[0])
    leave(world, number, 1.5)
    end_s = 1.0 + 39 * STEP_S + 60 * step_s
    assert charged(world, end_s - 0.01) == 1
    assert charged(world, end_s + 0.01) == 0
    assert_empty(world)


def test_a_leftover_without_max_tokens_is_charged_for_a_mean_answer() -> None:
    world = world_of()
    number = sent(world)
    world.core.on_first_token(FirstToken(1.0, number))
    leave(world, number, 1.0)
    end_s = 1.0 + (world.core.admission.output_tokens - 1) * STEP_S
    assert charged(world, end_s - 0.01) == 1
    assert charged(world, end_s + 0.01) == 0


def test_a_leftover_is_charged_for_at_most_600_s() -> None:
    world = world_of()
    leave(world, sent(world, max_output_tokens=2**30), 0.0)
    assert charged(world, 599.0) == 1
    assert charged(world, 601.0) == 0


def test_a_load_report_of_the_worker_ends_a_leftover() -> None:
    """If the worker's load report still contains a request after its estimated end, the request
    counts as load of other clients.
    """
    world = world_of()
    first, second = (sent(world, max_output_tokens=1_000) for _ in range(2))
    leave(world, first, 0.1)
    report(world, 2, 0.5)
    assert charged(world, 0.5) == 2
    assert not world.core.columns.foreign_running[0]
    report(world, 1, 1.0)
    assert charged(world, 1.0) == 1
    leave(world, second, 1.1)
    assert charged(world, 100.0) == 0
    report(world, 1, 100.5)
    assert world.core.columns.foreign_running[0] == 1
    assert_empty(world)


def test_a_load_report_does_not_end_a_request_whose_client_stays() -> None:
    world = world_of()
    number = sent(world, max_output_tokens=1_000)
    report(world, 0, 0.5)
    assert charged(world, 0.5) == 1
    world.core.on_finish(Finish(1.0, number, PROMPT, 0, 10))
    assert_empty(world)


def test_held_requests_are_retried_when_a_leftover_ends() -> None:
    world = world_of(worker_requests=1)
    leave(world, sent(world, max_output_tokens=10), 0.1)
    waiting = world.arrival(BLOCKS)
    world.core.on_arrival(waiting)
    assert world.core.held_requests == 1, "its place is taken"
    world.now_s = PREFILL_S + 1.0
    actions = world.core.on_tick(Tick(world.now_s))
    assert [a.request_id for a in actions if isinstance(a, Dispatch)] == [waiting.request_id]


@pytest.mark.parametrize("state", ["gone", "down"])
def test_a_leftover_ends_when_its_worker_leaves(state: str) -> None:
    world = world_of()
    leave(world, sent(world, max_output_tokens=1_000), 0.1)
    actions = world.core.on_worker(WorkerChange(0.2, 0, state))  # type: ignore[arg-type]
    assert not [action for action in actions if isinstance(action, Cancel)], (
        "no client waits for it"
    )
    assert_empty(world)


def test_a_silent_leftover_does_not_make_its_worker_stalled() -> None:
    world = world_of()
    number = sent(world, max_output_tokens=10_000)
    world.core.on_first_token(FirstToken(0.1, number))
    leave(world, number, 0.2)
    assert world.core.on_tick(Tick(5.0)) == []


def test_new_requests_avoid_a_worker_with_a_leftover() -> None:
    world = world_of(workers=2)
    number = sent(world, max_output_tokens=10_000)
    (at,) = (c.worker_id for w in (0, 1) for c in world.core.ledger.on_worker(w))
    leave(world, number, 0.1)
    (dispatch,) = world.core.on_arrival(world.arrival(list(range(500, 600))))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.worker_id == 1 - at


STEPS = ("ask", "first", "progress", "finish", "leave", "runs on", "report", "tick", "gone", "down")


@patient
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.booleans()), max_size=60)
)
def test_each_charge_is_released_once_in_random_histories(
    steps: list[tuple[str, int, bool]],
) -> None:
    world, open_requests = world_of(workers=2), list[int]()
    core, next_worker = world.core, 2
    for what, which, stream in steps:
        world.now_s += 0.3
        number = open_requests[which % len(open_requests)] if open_requests else -1
        if what == "ask":
            open_requests.append(sent(world, stream=stream, max_output_tokens=40 * which))
        elif what == "first":
            core.on_first_token(FirstToken(world.now_s, number))
        elif what == "progress":
            core.on_progress(Progress(world.now_s, number, 5 * which))
        elif what == "finish" and number in open_requests:
            open_requests.remove(number)
            core.on_finish(Finish(world.now_s, number, PROMPT, 0, 3))
        elif what in ("leave", "runs on") and number in open_requests:
            open_requests.remove(number)
            leave(world, number, world.now_s, runs_on=what == "runs on")
        elif what == "report":
            report(world, which, world.now_s, worker_id=which % 2)
        elif what == "tick":
            core.on_tick(Tick(world.now_s))
        elif what == "down" and core.workers.get(which) is not None:
            core.on_worker(WorkerChange(world.now_s, which, "down"))
            core.on_worker(WorkerChange(world.now_s, which, "ready"))
        elif what == "gone" and len(core.workers) > 1 and core.workers.get(which) is not None:
            for action in core.on_worker(WorkerChange(world.now_s, which, "gone")):
                assert isinstance(action, Cancel)
                core.on_failure(Failure(world.now_s, action.request_id, "busy"))
                open_requests.remove(action.request_id)
            world.join(next_worker, **SPEEDS)
            next_worker += 1
        assert core.columns.requests.sum() == len(core.ledger)
        assert len(core.ledger) == len(open_requests) + len(core.leftovers)
    for number in open_requests:
        leave(world, number, world.now_s, runs_on=False)
    core.on_tick(Tick(world.now_s + 1e4))
    assert_empty(world)
