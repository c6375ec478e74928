"""Tests of the core's view of workers' health: failure rates, refusals, trial requests, stalled
workers.
"""

from __future__ import annotations

import pytest

from policies.facts import Failure, Finish, FirstToken, Probed, Progress, Tick
from router.core.contract.actions import Action, Dispatch, Ejected, Probe, Reinstated
from tests.router.core.core_world import World


def sent(world: World) -> tuple[int, int]:
    """Send one more request; return its id and worker."""
    arrival = world.arrival([1])
    (action,) = world.core.on_arrival(arrival)
    assert isinstance(action, Dispatch)
    return arrival.request_id, action.worker_id


def fail_at(world: World, worker_id: int, times: int, reason: str = "status_5xx") -> list[Action]:
    """Send requests until `times` of them have failed at a worker; the others are answered."""
    actions: list[Action] = []
    while times:
        request_id, at = sent(world)
        if at == worker_id:
            failure = Failure(world.now_s, request_id, "worker", False, reason)
            actions += world.core.on_failure(failure)
            times -= 1
        else:
            world.core.on_finish(Finish(world.now_s, request_id))
    return actions


@pytest.mark.parametrize("answers", [Finish(0.0, 0, refused=True), None])
def test_client_errors_do_not_change_the_health_of_a_worker(answers: Finish | None) -> None:
    world = World(2, policy="round_robin")
    fail_at(world, 0, 2)
    for _ in range(80):
        request_id, _ = sent(world)
        if answers is None:
            world.core.on_failure(Failure(world.now_s, request_id, "client"))
        else:
            world.core.on_finish(Finish(world.now_s, request_id, refused=True))
    assert world.core.workers.get(0).health.failures == 2  # neither worse nor forgiven
    assert [type(a) for a in fail_at(world, 0, 1)] == [Ejected]


def test_failures_between_answers_eject_a_worker_by_their_rate() -> None:
    world = World(2, policy="round_robin", ejection_failures=100, ejection_requests=10)
    aside: list[Action] = []
    for number in range(12):
        request_id, at = sent(world)
        while at != 0:
            world.core.on_finish(Finish(world.now_s, request_id))
            request_id, at = sent(world)
        if number % 2:
            aside += world.core.on_failure(Failure(0.0, request_id, "worker", False, "garbage"))
        else:
            aside += world.core.on_finish(Finish(0.0, request_id))
        if aside:
            assert number == 9  # the tenth: as few are no rate
            break
    assert aside == [Ejected(0, 2.0, "garbage")]


def test_the_last_worker_of_a_pool_is_never_ejected() -> None:
    world = World(1)
    assert fail_at(world, 0, 20) == []
    assert world.core.counters.ejections_withheld == 18
    assert world.core.workers.get(0).takes_requests


def test_a_trial_stream_reinstates_the_worker_at_its_first_token() -> None:
    world = World(2, policy="round_robin")
    fail_at(world, 0, 3)
    world.now_s = 2.0
    assert world.core.on_tick(Tick(2.0)) == [Probe(0)]
    world.core.on_probed(Probed(2.0, 0, True))
    request_id = next(r for r, at in (sent(world) for _ in range(4)) if at == 0)
    assert world.core.on_first_token(FirstToken(2.1, request_id)) == [Reinstated(0)]
    assert world.core.workers.get(0).shown_state == "ready"


def stalled_world() -> World:
    """Return a world in which two streams of worker 0 began at time 0 s."""
    world = World(2, policy="round_robin", stall_s=0.5)
    for _ in range(4):
        request_id, at = sent(world)
        if at == 0:
            world.core.on_first_token(FirstToken(0.0, request_id))
        else:
            world.core.on_finish(Finish(0.0, request_id))
    assert world.core.on_tick(Tick(0.4)) == []
    assert world.core.on_tick(Tick(0.5)) == [Probe(0, 0.5)]
    return world


def test_a_stalled_worker_that_fails_its_probe_is_ejected() -> None:
    world = stalled_world()
    assert world.core.on_probed(Probed(1.0, 0, False)) == [Ejected(0, 2.0, "stalled")]
    assert world.core.workers.get(0).health.causes == {"stalled": 1}


@pytest.mark.parametrize("well", [True, False])
def test_a_stalled_worker_that_recovers_or_passes_its_probe_stays_in_the_pool(well: bool) -> None:
    world = stalled_world()
    if not well:
        grown = next(iter(world.core.ledger.on_worker(0))).request_id
        world.core.on_progress(Progress(0.9, grown, 5))
    assert world.core.on_probed(Probed(1.0, 0, well)) == []
    assert world.core.workers.get(0).takes_requests
