"""Tests of the decision core: it chooses and charges in one step, releases each charge once,
retries, holds, ejects, and is deterministic.
"""

from __future__ import annotations

import pytest

from policies.facts import (
    Failure,
    Finish,
    FirstToken,
    LoadReport,
    Probed,
    Progress,
    Tick,
    WorkerChange,
)
from policies.load import load
from router.core.contract.actions import Cancel, Dispatch, Ejected, Probe, Reject
from tests.router.core.core_world import BLOCK, World, stored


def test_a_request_is_sent_to_the_worker_with_its_prefix() -> None:
    world = World(policy="kv_prefix")
    world.events(1, 0, stored([1, 2, 3]))
    (action,) = world.core.on_arrival(world.arrival([1, 2, 3, 4]))
    assert isinstance(action, Dispatch)
    assert action.worker_id == 1
    assert action.decision.hit_tokens == 3 * BLOCK
    assert action.decision.candidates[0].worker_id == 1
    assert len(action.decision.candidates) == 3


def test_a_dispatch_counts_as_expected_hit_before_any_event() -> None:
    world = World(policy="kv_prefix")
    (first,) = world.core.on_arrival(world.arrival([1, 2, 3]))
    (second,) = world.core.on_arrival(world.arrival([1, 2, 9]))
    assert second.worker_id == first.worker_id
    assert second.decision.hit_tokens == 2 * BLOCK


def test_unconfirmed_expected_blocks_expire() -> None:
    world = World(policy="kv_prefix", speculative_s=10.0)
    world.core.on_arrival(world.arrival([1, 2, 3]))
    for _ in range(25):
        world.now_s += 0.5
        world.core.on_tick(Tick(world.now_s))
    (later,) = world.core.on_arrival(world.arrival([1, 2, 3]))
    assert later.decision.hit_tokens == 0


def test_expected_text_blocks_expire_later() -> None:
    world = World(policy="kv_prefix", speculative_s=10.0)
    world.core.on_arrival(world.arrival([1, 2, 3], approximate=True))
    world.now_s = 60.0
    world.core.on_tick(Tick(world.now_s))
    (later,) = world.core.on_arrival(world.arrival([1, 2, 3], approximate=True))
    assert later.decision.hit_tokens == 3 * BLOCK - 1  # one token is always computed


def test_a_dispatch_charges_its_worker_at_once() -> None:
    world = World(workers=2, policy="least_requests")
    chosen = [world.core.on_arrival(world.arrival([i]))[0].worker_id for i in range(6)]
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1]


def test_first_token_and_finish_move_and_release_the_charge() -> None:
    world = World(workers=1)
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    columns = world.core.columns
    assert (columns.requests[0], columns.waiting[0]) == (1, 1)
    world.core.on_first_token(FirstToken(0.1, arrival.request_id))
    assert (columns.waiting[0], columns.context_tokens[0]) == (0, 3 * BLOCK + 1)
    world.core.on_progress(Progress(0.2, arrival.request_id, 5))
    assert columns.context_tokens[0] == 3 * BLOCK + 5
    world.core.on_finish(Finish(0.3, arrival.request_id, output_tokens=6))
    assert (columns.requests[0], columns.context_tokens[0]) == (0, 0)
    assert world.core.inflight_requests == 0


def test_an_answer_that_does_not_stream_leaves_the_queue_at_the_estimated_time() -> None:
    world = World(workers=1)
    world.core.on_arrival(world.arrival([1, 2, 3], stream=False))
    world.core.on_tick(Tick(10.0))
    assert (world.core.columns.requests[0], world.core.columns.waiting[0]) == (1, 0)


def test_a_failed_dispatch_is_retried_at_each_other_worker_then_rejected() -> None:
    world = World(workers=3, max_attempts=3, ejection_failures=100)
    arrival = world.arrival([1])
    (action,) = world.core.on_arrival(arrival)
    seen = [action.worker_id]
    for _ in range(2):
        (action,) = world.core.on_failure(
            Failure(0.0, arrival.request_id, "worker", retry=True, reason="connect")
        )
        assert isinstance(action, Dispatch)
        seen.append(action.worker_id)
    assert sorted(seen) == [0, 1, 2]
    (action,) = world.core.on_failure(
        Failure(0.0, arrival.request_id, "worker", retry=True, reason="connect")
    )
    assert isinstance(action, Reject)
    assert action.status == 502
    assert world.core.inflight_requests == 0


def test_workers_that_keep_failing_are_ejected_and_reinstated() -> None:
    world = World(workers=2, policy="round_robin", ejection_failures=2, recover_s=2.0)

    def chosen() -> list[int]:
        arrivals = [world.arrival([i]) for i in range(6)]
        workers = [world.core.on_arrival(arrival)[0].worker_id for arrival in arrivals]
        for arrival in arrivals:
            world.core.on_finish(Finish(world.now_s, arrival.request_id))
        return workers

    arrivals = [world.arrival([i]) for i in range(4)]
    for arrival in arrivals:
        if world.core.on_arrival(arrival)[0].worker_id == 0:
            world.core.on_failure(Failure(0.0, arrival.request_id, "worker", reason="connect"))
    assert set(chosen()) == {1}
    world.now_s = 2.1
    assert set(chosen()) == {1}  # its time is over, and it has not been asked yet
    assert world.core.on_tick(Tick(world.now_s)) == [Probe(0)]
    assert world.core.on_probed(Probed(world.now_s, 0, well=True)) == []
    assert chosen().count(0) == 1  # one at a time, until that one is answered
    assert set(chosen()) == {0, 1}


def test_a_client_disconnect_does_not_count_against_the_worker() -> None:
    world = World(workers=1, ejection_failures=1)
    arrival = world.arrival([1])
    world.core.on_arrival(arrival)
    world.core.on_failure(Failure(0.0, arrival.request_id, "client"))
    assert world.core.workers.get(0).takes_requests
    assert world.core.columns.requests[0] == 0


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "this router serves: m"),
        ({"prompt_tokens": 500}, 400, "500 tokens"),
    ],
)
def test_requests_that_no_worker_can_serve_are_rejected_with_the_reason(
    change: dict, status: int, words: str
) -> None:
    world = World(workers=0)
    world.join(0, max_model_tokens=100)
    (action,) = world.core.on_arrival(world.arrival([1], **change))
    assert isinstance(action, Reject)
    assert action.status == status
    assert words in action.message


def test_requests_are_rejected_with_retry_after_if_all_workers_are_down() -> None:
    world = World(workers=2)
    for worker_id in (0, 1):
        world.core.on_worker(WorkerChange(0.0, worker_id, "down"))
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Reject)
    assert (action.status, action.retry_after_s) == (503, 1.0)


def test_a_busy_worker_is_skipped_and_not_ejected() -> None:
    world = World(workers=2)
    for _ in range(10):
        (first,) = world.core.on_arrival(world.arrival([1]))
        assert isinstance(first, Dispatch)
        failure = Failure(world.now_s, first.request_id, "busy", True, "busy")
        (second,) = world.core.on_failure(failure)
        assert isinstance(second, Dispatch)
        assert second.worker_id != first.worker_id
        world.core.on_finish(Finish(world.now_s, first.request_id))
    assert world.core.counters.ejections == 0


def test_a_request_over_the_limit_is_rejected_with_router_full() -> None:
    world = World(inflight_requests=1)
    world.core.on_arrival(world.arrival([1]))
    (action,) = world.core.on_arrival(world.arrival([2]))
    assert isinstance(action, Reject)
    assert action.code == "router_full"


def test_removing_a_worker_cancels_its_requests_and_frees_its_slot() -> None:
    world = World(workers=1)
    arrival = world.arrival([1])
    world.core.on_arrival(arrival)
    actions = world.core.on_worker(WorkerChange(0.0, 0, "gone"))
    assert actions == [Cancel(arrival.request_id, 0, "worker removed")]
    world.join(9)
    assert world.core.columns.requests[0] == 0
    (again,) = world.core.on_failure(
        Failure(0.0, arrival.request_id, "worker", retry=True, reason="early_close")
    )
    assert isinstance(again, Dispatch)
    assert again.worker_id == 9


def test_foreign_load_counts_until_its_report_is_stale() -> None:
    world = World(workers=2, policy="least_requests", signal_stale_s=5.0)
    world.core.on_load_report(LoadReport(0.0, 0, running=7, waiting=1, kv_used_tokens=10.0))
    assert world.core.on_arrival(world.arrival([1]))[0].worker_id == 1
    assert world.core.on_arrival(world.arrival([2]))[0].worker_id == 1
    world.now_s = 6.0
    assert world.core.on_arrival(world.arrival([3]))[0].worker_id == 0


def test_own_requests_in_a_report_are_not_counted_twice() -> None:
    world = World(workers=1)
    arrival = world.arrival([1])
    world.core.on_arrival(arrival)
    world.core.on_first_token(FirstToken(0.1, arrival.request_id))
    # The report was taken before the first token: there the request still waits.
    world.core.on_load_report(LoadReport(0.2, 0, running=0, waiting=1, kv_used_tokens=0.0))
    assert world.core.columns.foreign_running[0] == 0
    assert world.core.columns.foreign_waiting[0] == 0


def test_an_explanation_changes_no_state() -> None:
    world = World()
    before = world.core.columns.requests.copy()
    choice = world.core.explain(world.arrival([1, 2]))
    assert choice is not None
    assert not isinstance(choice, Reject)
    assert (world.core.columns.requests == before).all()
    assert world.core.inflight_requests == 0
    assert world.core.on_arrival(world.arrival([1, 2]))[0].worker_id == choice.worker.worker_id


def _replayed(policy: str) -> list[object]:
    world = World(workers=4, policy=policy)
    log: list[object] = []
    for i in range(60):
        world.now_s = i * 0.05
        arrival = world.arrival([i % 3, i % 5, i])
        log += world.core.on_arrival(arrival)
        if i % 3 == 0:
            log += world.core.on_finish(Finish(world.now_s, arrival.request_id))
    return log


@pytest.mark.parametrize("policy", ["hybrid", "power_of_two", "random", "hybrid?temperature=0.5"])
def test_the_same_facts_and_seed_give_the_same_actions(policy: str) -> None:
    assert _replayed(policy) == _replayed(policy)


def test_a_policy_can_be_changed_while_requests_run() -> None:
    world = World(policy="round_robin")
    world.core.on_arrival(world.arrival([1]))
    world.core.set_policy(load("kv_load"))
    (action,) = world.core.on_arrival(world.arrival([2]))
    assert action.decision.policy == "kv_load"


def test_simultaneous_failures_eject_a_worker_once() -> None:
    world = World(workers=2, policy="kv_prefix", ejection_failures=2, recover_s=2.0, max_attempts=1)
    world.events(0, 0, stored([1, 2, 3]))
    arrivals = [world.arrival([1, 2, 3, i]) for i in range(6)]
    for arrival in arrivals:
        world.core.on_arrival(arrival)
    ejections = []
    for arrival in arrivals:
        fact = Failure(0.0, arrival.request_id, "worker", reason="connect")
        ejections += [a for a in world.core.on_failure(fact) if isinstance(a, Ejected)]
    assert ejections == [Ejected(0, 2.0, "connect")]
    assert world.core.counters.ejections == 1


def test_an_ejected_worker_is_tried_if_no_other_worker_is_available() -> None:
    world = World(workers=2, ejection_failures=1)
    arrival = world.arrival([1])
    (action,) = world.core.on_arrival(arrival)
    failing, other = action.worker_id, 1 - action.worker_id
    world.core.on_failure(Failure(0.0, arrival.request_id, "worker", reason="connect"))
    assert world.core.workers.get(failing).shown_state == "ejected"
    world.core.on_worker(WorkerChange(0.0, other, "down"))
    (action,) = world.core.on_arrival(world.arrival([2]))
    assert action.worker_id == failing
