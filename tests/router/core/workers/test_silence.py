"""Tests of workers that do not answer probes: one among healthy ones, or most of them, and what
ends that state.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Probed, Silence, Tick, WorkerChange
from router.core.contract.actions import (
    Abandon,
    Action,
    Dispatch,
    Ejected,
    Hold,
    Panic,
    Probe,
    Reject,
)
from router.core.placement.choice import Withheld
from tests.router.core.core_world import World, stored


def silent(world: World, worker_id: int, probes: int = 1) -> list[Action]:
    return world.core.on_silence(Silence(world.now_s, worker_id, probes))


def answers(world: World, worker_id: int) -> list[Action]:
    return world.core.on_silence(Silence(world.now_s, worker_id, 0))


def worker_of_next(world: World, **fields: object) -> int | None:
    """Return the worker that gets one more request, or None if the request is held."""
    arrival = world.arrival([1], **fields)
    (action,) = world.core.on_arrival(arrival)
    assert not isinstance(action, Reject), action
    return action.worker_id if isinstance(action, Dispatch) else None


def state(world: World, worker_id: int) -> str:
    worker = world.core.workers.get(worker_id)
    assert worker is not None
    return worker.shown_state


def test_a_silent_worker_gets_no_new_requests_and_keeps_its_cache() -> None:
    world = World(3, policy="kv_prefix")
    world.events(1, 0, stored([1, 2]))
    assert silent(world, 1) == []
    assert state(world, 1) == "silent"
    assert 1 not in {worker_of_next(world) for _ in range(30)}
    assert answers(world, 1) == []
    assert (state(world, 1), world.hits([1, 2])) == ("ready", [0, 2, 0])
    assert worker_of_next(world) == 1


def test_requests_at_a_silent_worker_are_moved_once_after_enough_probes() -> None:
    world = World(3)
    assert silent(world, 1) == []
    assert silent(world, 1, 2) == [Abandon(1)]
    assert state(world, 1) == "down"
    assert silent(world, 1, 3) == []
    assert world.core.on_tick(Tick(0.0)) == []


@pytest.mark.parametrize(
    ("workers", "quiet", "panics"),
    [(1, 1, True), (2, 1, False), (2, 2, True), (3, 1, False), (3, 2, True), (4, 2, False),
     (4, 3, True), (8, 4, False), (8, 5, True)],
)  # fmt: skip
def test_no_requests_move_if_most_workers_of_a_model_are_silent(
    workers: int, quiet: int, panics: bool
) -> None:
    world = World(workers, policy="round_robin", panic_share=0.5)
    actions = [a for n in range(quiet) for a in silent(world, n, 1)]
    assert actions == ([Panic("m", quiet, workers, True)] if panics else [])
    moved = [a for n in range(quiet) for a in silent(world, n, 2)]
    assert moved == ([] if panics else [Abandon(n) for n in range(quiet)])
    got = {worker_of_next(world) for _ in range(2 * workers)}
    assert got == ({None} if quiet == workers else set(range(quiet, workers)))


def test_a_worker_still_silent_after_a_panic_gets_the_full_time_again() -> None:
    world = World(3)
    for worker_id in range(3):
        silent(world, worker_id, 5)
    assert answers(world, 0) == []
    assert answers(world, 1) == [Panic("m", 1, 3, False)]
    assert silent(world, 2, 6) == []
    assert silent(world, 2, 7) == [Abandon(2)]


def test_new_requests_wait_until_a_silent_worker_answers() -> None:
    world = World(3)
    running = [worker_of_next(world) for _ in range(6)]
    for worker_id in range(3):
        silent(world, worker_id, 2)
    held = world.arrival([2])
    assert world.core.on_arrival(held) == [Hold(held.request_id, "policy")]
    shown = world.core.explain_held(held.request_id, 0.0)
    assert isinstance(shown, Withheld)
    assert shown.limit == "most of its workers are silent"
    world.now_s = 8.0
    assert world.core.on_tick(Tick(8.0)) == []
    (sent,) = answers(world, 2)  # two of three are silent still, and one takes requests
    assert isinstance(sent, Dispatch)
    assert (sent.request_id, sent.worker_id) == (held.request_id, 2)
    assert None not in running


def test_requests_that_wait_for_silent_workers_are_rejected_after_hold_s() -> None:
    world = World(1, hold_s=5.0)
    silent(world, 0)
    assert worker_of_next(world) is None
    assert world.core.on_tick(Tick(4.9)) == []
    (refused,) = world.core.on_tick(Tick(5.0))
    assert isinstance(refused, Reject)
    assert (refused.status, refused.code) == (503, "hold_timeout")


def test_a_dead_worker_does_not_end_the_wait_for_silent_workers() -> None:
    """A request that failed at a dead worker waits for the workers that do not answer probes,
    because no other worker serves it.
    """
    world = World(3, policy="round_robin")
    arrival = world.arrival([1])
    (sent,) = world.core.on_arrival(arrival)
    dead, *others = sent.worker_id, *({0, 1, 2} - {sent.worker_id})
    for worker_id in others:
        silent(world, worker_id)
    failure = Failure(0.0, arrival.request_id, "worker", True, "connect")
    assert world.core.on_failure(failure) == [Hold(arrival.request_id, "policy")]
    world.core.on_worker(WorkerChange(0.0, dead, "down"))
    assert worker_of_next(world) is None
    sent = [a for a in answers(world, others[0]) if isinstance(a, Dispatch)]
    assert [a.worker_id for a in sent] == [others[0]] * 2


def test_failures_at_a_silent_worker_neither_eject_nor_exclude_it() -> None:
    world = World(1)
    there = []
    for _ in range(5):
        arrival = world.arrival([1])
        world.core.on_arrival(arrival)
        there.append(arrival.request_id)
    silent(world, 0)
    for request_id in there:
        failure = Failure(0.0, request_id, "worker", True, "timeout_connect")
        assert world.core.on_failure(failure) == [Hold(request_id, "policy")]
    sent = [a.request_id for a in answers(world, 0) if isinstance(a, Dispatch)]
    assert sent == there
    assert state(world, 0) == "ready"


def test_a_worker_that_goes_down_is_no_longer_silent() -> None:
    world = World(2)
    silent(world, 0)
    world.core.on_worker(WorkerChange(1.0, 0, "down"))
    assert state(world, 0) == "down"
    world.core.on_worker(WorkerChange(2.0, 0, "ready"))
    assert state(world, 0) == "ready"


def streaming(world: World, workers: int) -> None:
    """Let one stream begin at each of the workers."""
    for _ in range(workers):
        arrival = world.arrival([1])
        world.core.on_arrival(arrival)
        world.core.on_first_token(FirstToken(world.now_s, arrival.request_id))


def test_streams_stalled_at_all_workers_eject_no_worker() -> None:
    world = World(3, policy="round_robin", stall_s=0.5)
    streaming(world, 3)
    assert world.core.on_tick(Tick(0.5)) == [Probe(n, 0.5) for n in range(3)]
    assert [world.core.on_probed(Probed(1.0, n, False)) for n in range(3)] == [[], [], []]
    assert world.core.counters.ejections == 0


def test_a_stalled_worker_is_ejected_if_the_other_workers_pass_their_probes() -> None:
    world = World(3, policy="round_robin", stall_s=0.5)
    streaming(world, 3)
    world.core.on_tick(Tick(0.5))
    assert world.core.on_probed(Probed(0.9, 0, False)) == []
    for worker_id in (1, 2):
        assert world.core.on_probed(Probed(0.9, worker_id, True)) == []
    world.core.on_tick(Tick(1.0))
    for worker_id in (1, 2):
        world.core.on_probed(Probed(1.1, worker_id, True))
    assert world.core.on_probed(Probed(1.5, 0, False)) == [Ejected(0, 2.0, "stalled")]
    silent(world, 0)
    assert state(world, 0) == "silent"
    answers(world, 0)
    assert state(world, 0) == "ready"  # at once, without a trial


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["silent", "moves", "answers", "down", "ready"])
        ),
        max_size=40,
    )
)
def test_silent_workers_get_no_requests_and_requests_wait_while_most_are(steps) -> None:
    world = World(4)
    quiet: set[int] = set()
    down: set[int] = set()
    for worker_id, step in steps:
        match step:
            case "silent" | "moves":
                silent(world, worker_id, 2 if step == "moves" else 1)
                quiet |= {worker_id} - down
            case "answers":
                answers(world, worker_id)
                quiet.discard(worker_id)
            case state:
                if state == "ready" and worker_id not in down:
                    continue
                world.core.on_worker(WorkerChange(0.0, worker_id, state))
                quiet.discard(worker_id)
                (down.add if state == "down" else down.discard)(worker_id)
        world.core.on_tick(Tick(0.0))
        ready = set(range(4)) - down
        arrival = world.arrival([1])
        (action,) = world.core.on_arrival(arrival)
        assert (world.core.health.silences.panics == {"m"}) == (2 * len(quiet) > len(ready))
        if ready - quiet:
            assert isinstance(action, Dispatch)
            assert action.worker_id in ready - quiet
            world.core.on_finish(Finish(0.0, arrival.request_id))
        elif ready:
            assert isinstance(action, Hold)
            world.core.on_failure(Failure(0.0, arrival.request_id, "client"))
        else:
            assert isinstance(action, Reject)
    assert world.core.inflight_requests == 0
