"""Tests of workers that report that they are busy: which other workers are tried, for how long the
busy one gets no requests, and what that costs.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Prefilled, Tick, WorkerChange
from router.core.contract.actions import Busied, Dispatch, Reject, Relieved
from tests.effort import examples
from tests.router.core.core_world import World, stored

NO_BUDGET = {"retry_share": 0.0, "retries_per_s": 0.0}
POLICIES = ["hybrid", "warmset", "round_robin", "least_requests", "kv_prefix"]


def sent(world: World, *blocks: int, **fields: object) -> Dispatch:
    (action,) = world.core.on_arrival(world.arrival(list(blocks or (1,)), **fields))
    assert isinstance(action, Dispatch)
    return action


def refused(world: World, request_id: int, busy_s: float = 0.0, retry: bool = True) -> list:
    fact = Failure(world.now_s, request_id, "busy", retry, "busy", busy_s=busy_s)
    return world.core.on_failure(fact)


def answered(world: World, request_id: int) -> None:
    world.core.on_first_token(FirstToken(world.now_s, request_id))
    world.core.on_finish(Finish(world.now_s, request_id, output_tokens=1))


def placed(actions: list) -> Dispatch | Reject:
    (action,) = (a for a in actions if isinstance(a, Dispatch | Reject))
    return action


def refuse_as_busy(world: World, worker_id: int, busy_s: float = 0.0) -> list:
    """Send a request that only this worker may serve, and let the worker refuse it as busy."""
    action = sent(world, 1, only=worker_id)
    return refused(world, action.request_id, busy_s, retry=False)


def busy_workers(world: World) -> list[int]:
    return [w.worker_id for w in world.core.workers if w.busy]


def pass_time(world: World, seconds: float) -> list:
    world.now_s += seconds
    return world.core.on_tick(Tick(world.now_s))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("warm", [False, True])
def test_a_worker_that_refuses_gets_no_requests_while_others_have_room(
    policy: str, warm: bool
) -> None:
    world = World(4, policy=policy, **NO_BUDGET)
    if warm:
        world.events(0, 0, stored([1, 2, 3]))
    tries = errors = 0
    for _ in range(400):
        world.now_s += 0.01
        action = sent(world, 1, 2, 3, 4)
        while action.worker_id == 0:
            tries += 1
            action = placed(refused(world, action.request_id))
            if isinstance(action, Reject):
                errors += 1
                break
            assert action.after_s == 0.0
        else:
            answered(world, action.request_id)
        world.core.on_tick(Tick(world.now_s))
    assert (errors, tries <= 8) == (0, True)
    assert world.core.counters.ejections == world.core.counters.retries_refused == 0
    assert world.core.workers.get(0).health.failures == 0


def test_every_worker_that_is_not_busy_is_tried_beyond_attempts_and_budget() -> None:
    world = World(8, max_attempts=2, **NO_BUDGET)
    action, seen = sent(world), []
    while isinstance(action, Dispatch):
        seen.append(action.worker_id)
        assert action.after_s == 0.0
        action = placed(refused(world, action.request_id, 900.0))
    assert sorted(seen) == list(range(8))
    assert action.code in ("worker_error", "retry_budget_exhausted"), "the last one's answer"


def test_a_busy_period_lasts_as_reported_up_to_busy_max_s() -> None:
    for reported_s, lasts_s in ((0.0, 0.5), (1.0, 1.0), (0.2, 0.2), (900.0, 5.0), (math.inf, 5.0)):
        world = World(2)
        assert refuse_as_busy(world, 0, reported_s) == [Busied(0, lasts_s)]
        pass_time(world, lasts_s - 0.01)
        assert busy_workers(world) == [0]
        assert {sent(world).worker_id for _ in range(6)} == {1}
        world.now_s += 0.01  # and no tick: the next request ends it
        assert {sent(world, i).worker_id for i in range(9)} == {0, 1}
        assert busy_workers(world) == []


def test_busy_periods_double_until_the_worker_answers() -> None:
    world = World(2)
    lasted = []
    for reported_s in (0.0, 0.0, 0.0, 0.0, 0.0):
        refuse_as_busy(world, 0, reported_s)
        since_s = world.now_s
        lasted.append(world.core.workers.get(0).spell.until_s - since_s)
        pass_time(world, lasted[-1])
    assert lasted == [0.5, 1.0, 2.0, 4.0, 5.0]
    answered(world, sent(world, 1, only=0).request_id)
    refuse_as_busy(world, 0)
    assert world.core.workers.get(0).spell.until_s - world.now_s == 0.5


def test_requests_sent_before_a_busy_period_do_not_affect_it() -> None:
    world = World(2)
    early = [sent(world, i, only=0).request_id for i in range(20)]
    for request_id in early[:10]:
        refused(world, request_id, retry=False)
    spell = world.core.workers.get(0).spell
    assert (spell.times, spell.until_s) == (1, 0.5)
    pass_time(world, 0.6)
    refuse_as_busy(world, 0)
    assert spell.times == 2
    answered(world, early[10])  # it says nothing of how the worker is since
    assert spell.times == 2
    pass_time(world, 1.1)
    refused(world, early[11], retry=False)
    assert spell.times == 2


def test_an_answer_by_one_of_all_busy_workers_does_not_attract_all_requests() -> None:
    world = World(3, policy="least_requests")
    for worker_id in range(3):
        refuse_as_busy(world, worker_id, 900.0)
    seen = []
    for _ in range(9):
        action = sent(world)
        seen.append(action.worker_id)
        answered(world, action.request_id)
        action = sent(world)
        seen.append(action.worker_id)
    assert set(seen) == {0, 1, 2}


def test_with_all_workers_busy_choices_and_bounds_are_as_with_none_busy() -> None:
    bounds = {"max_attempts": 2, "retry_share": 0.0, "retries_per_s": 0.1}  # one in ten seconds
    worlds = World(3, **bounds), World(3, **bounds)
    for worker_id in range(3):
        for world in worlds:
            action = sent(world, 1, only=worker_id)
            if world is worlds[0]:
                refused(world, action.request_id, 900.0, retry=False)
            else:
                world.core.on_failure(Failure(world.now_s, action.request_id, "client"))
    assert busy_workers(worlds[0]) == [0, 1, 2]
    for blocks in ([1, 2], [3], [1, 2, 4], [5]):
        actions = [sent(world, *blocks) for world in worlds]
        assert actions[0] == actions[1]
    again = [placed(refused(w, a.request_id, 900.0)) for w, a in zip(worlds, actions, strict=True)]
    assert isinstance(again[0], Dispatch)
    assert placed(refused(worlds[0], again[0].request_id, 900.0)).code == "worker_error"
    action = placed(refused(worlds[0], sent(worlds[0], 7).request_id, 900.0))
    assert action.code == "retry_budget_exhausted"


def test_the_only_worker_is_tried_even_if_it_is_busy() -> None:
    world = World(1)
    refuse_as_busy(world, 0, 900.0)
    action = sent(world)
    assert action.worker_id == 0
    assert placed(refused(world, action.request_id)).code == "worker_error"


def test_a_busy_worker_is_preferred_to_an_ejected_worker() -> None:
    world = World(2, ejection_failures=1)
    action = sent(world, 1, only=0)
    world.core.on_failure(Failure(0.0, action.request_id, "worker", False, "connect"))
    refuse_as_busy(world, 1, 900.0)
    assert world.core.workers.get(0).shown_state == "ejected"
    assert world.core.workers.get(1).shown_state == "busy"
    assert {sent(world).worker_id for _ in range(5)} == {1}


def test_a_prompt_that_only_a_busy_worker_can_serve_is_sent_to_it() -> None:
    world = World(0)
    world.join(0, max_model_tokens=1_000)
    world.join(1, max_model_tokens=10)
    refuse_as_busy(world, 0, 900.0)
    assert sent(world, 1).worker_id == 1
    assert sent(world, *range(20)).worker_id == 0


def test_held_requests_are_sent_when_a_busy_period_ends() -> None:
    world = World(2, worker_requests=1)
    first = sent(world, 1, only=1)
    refuse_as_busy(world, 0, 2.0)
    world.core.on_arrival(waiting := world.arrival([1]))
    assert world.core.held_requests == 1
    (action,) = (a for a in pass_time(world, 2.0) if isinstance(a, Dispatch))
    assert (action.request_id, action.worker_id) == (waiting.request_id, 0)
    answered(world, action.request_id)
    refuse_as_busy(world, 0, 2.0)
    world.core.on_arrival(waiting := world.arrival([1]))
    assert world.core.held_requests == 1
    actions = world.core.on_finish(Finish(world.now_s, first.request_id))
    assert placed(actions).worker_id == 1


def test_a_worker_in_slow_start_takes_all_requests_while_others_are_busy() -> None:
    world = World(2, slow_start_s=30.0)
    world.now_s = 40.0
    world.join(2)
    for worker_id in (0, 1):
        refuse_as_busy(world, worker_id, 5.0)
    assert {sent(world, i).worker_id for i in range(6)} == {2}


LEGS = {"group": "g", "serves_alone": False}


@pytest.mark.parametrize("concurrent", [False, True])
def test_both_legs_avoid_busy_workers(concurrent: bool) -> None:
    world = World(0, disaggregation="always", **NO_BUDGET)
    for worker_id in range(6):
        role = "prefill" if worker_id < 3 else "decode"
        world.join(worker_id, role=role, concurrent=concurrent, **LEGS)
    blocks = list(range(9))
    for busy_id in (0, 1, 3, 4):
        action = sent(world, *blocks, splits=True)
        legs = {"leg": "prefill"} if concurrent and busy_id < 3 else {}
        fact = Failure(world.now_s, action.request_id, "busy", True, "busy", busy_s=5.0, **legs)
        wrong = action.stages[0].worker_id
        if busy_id >= 3:
            if not concurrent:
                (action,) = world.core.on_prefilled(Prefilled(world.now_s, action.request_id, 0))
            wrong = action.worker_id
        again = placed(world.core.on_failure(fact))
        assert isinstance(again, Dispatch)
        assert wrong not in [s.worker_id for s in again.stages]
        assert wrong in busy_workers(world)
        world.core.on_failure(Failure(world.now_s, action.request_id, "client"))
    for _ in range(6):
        action = sent(world, *blocks, splits=True)
        assert not {s.worker_id for s in action.stages} & set(busy_workers(world))
        world.core.on_failure(Failure(world.now_s, action.request_id, "client"))
    assert len(world.core.ledger) == 0


def test_a_group_whose_prefill_worker_is_busy_is_skipped() -> None:
    world = World(0, disaggregation="always")
    for worker_id, (role, group) in enumerate(
        [("prefill", "a"), ("decode", "a"), ("prefill", "b"), ("decode", "b")]
    ):
        world.join(worker_id, role=role, group=group, serves_alone=False)
    action = sent(world, 1, 2, splits=True)
    wrong = action.worker_id
    again = placed(refused(world, action.request_id, 5.0))
    assert again.worker_id == (wrong + 2) % 4
    assert sent(world, 1, 2, splits=True).worker_id == again.worker_id


def test_a_busy_episode_is_reported_once_and_its_end_once() -> None:
    world = World(2)
    actions: list = []
    for _ in range(50):
        actions += refuse_as_busy(world, 0)
        actions += pass_time(world, 0.3)
    assert actions == [Busied(0, 0.5)]
    actions = []
    for _ in range(120):
        actions += pass_time(world, 0.1)
    assert [type(action) for action in actions] == [Relieved]
    assert refuse_as_busy(world, 0) == [Busied(0, 0.5)], "the row is over, too"


def test_a_restarted_or_removed_worker_leaves_no_busy_state() -> None:
    world = World(3)
    for worker_id in (0, 1):
        refuse_as_busy(world, worker_id, 900.0)
    world.core.on_worker(WorkerChange(world.now_s, 0, "down"))
    world.core.on_worker(WorkerChange(world.now_s, 0, "ready"))
    world.core.on_worker(WorkerChange(world.now_s, 1, "gone"))
    assert busy_workers(world) == []
    pass_time(world, 20.0)
    assert world.core.health.busy.next_s == math.inf
    assert pass_time(world, 1.0) == []


def test_no_worker_is_paused_if_busy_max_s_is_0() -> None:
    world = World(2, busy_max_s=0.0, max_attempts=2)
    assert refuse_as_busy(world, 0, 5.0) == []
    assert {sent(world, i).worker_id for i in range(6)} == {0, 1}


def test_a_busy_failure_without_a_pause_changes_nothing() -> None:
    """Facts without a time for the pause change nothing, as in old recordings and for "busy" from
    the router's own limits.
    """
    world = World(2)
    action = sent(world)
    world.core.on_failure(Failure(world.now_s, action.request_id, "busy", True, "busy"))
    assert busy_workers(world) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "busy", "fail", "finish", "leave", "wait", "tick"]),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.1, 1.0, 3.0, 900.0]),
    ),
    max_size=80,
)


@given(steps=STEPS, workers=st.integers(1, 5), policy=st.sampled_from(POLICIES))
@settings(max_examples=examples(60), deadline=None)
def test_busy_periods_are_bounded_and_end_in_random_histories(
    steps: list, workers: int, policy: str
) -> None:
    world = World(workers, policy=policy, ejection_failures=3, **NO_BUDGET)
    core, open_at = world.core, {}

    def note(actions: list) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                open_at[action.request_id] = action.worker_id
            elif isinstance(action, Reject):
                open_at.pop(action.request_id, None)

    for step, which, seconds in steps:
        if step == "wait":
            world.now_s += min(seconds, 3.0)
        elif step == "tick":
            note(core.on_tick(Tick(world.now_s)))
        elif step == "arrive" or not open_at:
            note(core.on_arrival(world.arrival([which, 1])))
        else:
            request_id = sorted(open_at)[which % len(open_at)]
            worker_id = open_at.pop(request_id)
            if step == "busy":
                tried = {*core._pending[request_id].tried, worker_id}
                free = [
                    w.worker_id
                    for w in core.workers
                    if w.takes_requests and not w.busy and w.worker_id not in tried
                ]
                note(actions := refused(world, request_id, seconds))
                if free:  # somebody had room, and no budget was needed
                    assert placed(actions).worker_id in free
            elif step == "fail":
                fact = Failure(world.now_s, request_id, "worker", True, "status_5xx")
                note(core.on_failure(fact))
            elif step == "finish":
                answered(world, request_id)
            else:
                core.on_failure(Failure(world.now_s, request_id, "client"))
        for worker in core.workers:
            assert worker.spell.until_s <= world.now_s + 5.0
            assert worker.health.causes["busy"] == 0
    for request_id in list(core._pending):
        core.on_failure(Failure(world.now_s, request_id, "client"))
    assert core.inflight_requests == len(core.ledger) == 0
    assert not core.columns.requests.any()
    world.now_s += 5.0
    core.on_tick(Tick(world.now_s))
    assert busy_workers(world) == []
