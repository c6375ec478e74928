"""Tests of limits of a model's requests over all its workers: they are never exceeded, and each
request is answered once.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Tick, WorkerChange
from router.core.contract.actions import Action, Cancel, Dispatch, Hold, Reject
from router.core.placement.admission import ModelLimit
from router.core.placement.choice import Withheld
from router.record.explain import withheld
from router.record.model_limits import model_limits
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World
from tests.router.core.placement.split_world import (
    ENDS,
    LONG,
    SLOW,
    ask,
    assert_empty,
    legs,
    pool,
    prefilled,
)
from tests.router.core.random_world import MODELS, RandomWorld

PROMPT_MAX = 700  # tokens of `RandomWorld`


def limited(*lines: str, workers: int = 3, **settings_: object) -> World:
    world = World(workers=workers, **settings_)
    world.core.model_limits.limits = model_limits(lines)
    return world


def test_requests_over_the_limit_of_a_model_wait_and_other_models_do_not() -> None:
    world = limited("m:max_requests=2")
    core = world.core
    world.join(5, models=("other",))
    first, second, third = (world.arrival([n]) for n in range(3))
    sent = [core.on_arrival(one)[0] for one in (first, second, third)]
    assert [type(one) for one in sent] == [Dispatch, Dispatch, Hold]
    assert isinstance(core.on_arrival(world.arrival([4], model="other"))[-1], Dispatch)
    urgent = world.arrival([5], priority=-1)
    assert isinstance(core.on_arrival(urgent)[0], Hold)
    (action,) = core.on_finish(Finish(1.0, first.request_id))
    assert isinstance(action, Dispatch)
    assert action.request_id == urgent.request_id
    core.model_limits.limits = {}  # as a reload does
    (action,) = core.on_tick(Tick(1.1))
    assert isinstance(action, Dispatch)
    assert action.request_id == third.request_id


def test_uncomputed_prompts_count_until_their_first_token() -> None:
    world = limited(f"m:max_queued_tokens={3 * BLOCK}")
    core = world.core
    large, late = world.arrival([1, 2, 3]), world.arrival([4])
    assert isinstance(core.on_arrival(large)[0], Dispatch)
    assert isinstance(core.on_arrival(late)[0], Hold)
    core.on_first_token(FirstToken(0.1, large.request_id))
    assert isinstance(core.on_tick(Tick(0.1))[0], Dispatch)


def test_the_explanation_and_the_rejection_contain_the_model_limit() -> None:
    world = limited("m:max_requests=1", hold_s=5.0)
    core = world.core
    core.on_arrival(world.arrival([1]))
    held = world.arrival([2])
    core.on_arrival(held)
    found = core.explain_held(held.request_id, 1.0)
    assert isinstance(found, Withheld)
    assert withheld(1, found)["limit"] == "the model's limit of 1 requests is reached"
    (reject,) = core.on_tick(Tick(6.0))
    assert isinstance(reject, Reject)
    assert (reject.status, reject.code) == (503, "hold_timeout")
    assert reject.message.endswith(
        "within 5 s (limits.hold_s): the model's limit of 1 requests is reached"
    )
    assert reject.retry_after_s is not None


def test_a_request_is_held_no_longer_than_its_own_hold_s() -> None:
    world = limited("m:max_requests=1", hold_s=5.0)
    core = world.core
    core.on_arrival(world.arrival([1]))
    brief, long, any_time = (world.arrival([2], hold_s=s) for s in (0.5, 60.0, None))
    for one in (brief, long, any_time):
        core.on_arrival(one)
    assert core.on_tick(Tick(0.4)) == []
    (reject,) = core.on_tick(Tick(0.5))
    assert isinstance(reject, Reject)
    assert (reject.request_id, reject.code) == (brief.request_id, "hold_timeout")
    assert "within 0.5 s" in reject.message
    late = core.on_tick(Tick(5.0))
    assert {one.request_id for one in late} == {long.request_id, any_time.request_id}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_with_two_legs_counts_once(at_once: bool) -> None:
    world = pool("prefill", "decode", concurrent=at_once, serves_alone=False)
    core = world.core
    core.model_limits.limits = model_limits(["m:max_requests=1"])
    number, actions = ask(world)
    assert core.model_limits.requests("m") == 1
    _, later = ask(world, LONG[:9])
    assert isinstance(later[0], Hold)
    actions = prefilled(world, number)
    assert legs(actions) == ([] if at_once else [(1, "decode")])
    assert core.model_limits.requests("m") == 1
    core.on_first_token(FirstToken(world.now_s + 0.1, number))
    (action,) = core.on_finish(Finish(world.now_s + 1.0, number, len(LONG) * BLOCK, 0, 10))
    assert isinstance(action, Dispatch)
    core.on_failure(Failure(world.now_s + 2.0, action.request_id, "client"))
    assert core.model_limits.requests("m") == 0
    assert_empty(world)


def test_removing_a_worker_releases_its_requests_from_the_limit() -> None:
    world = limited("m:max_requests=1", workers=2)
    core = world.core
    one = world.arrival([1])
    (sent,) = core.on_arrival(one)
    assert isinstance(sent, Dispatch)
    core.on_worker(WorkerChange(1.0, sent.worker_id, "gone"))
    assert core.model_limits.requests("m") == 0
    again = core.on_failure(Failure(1.0, one.request_id, "busy", retry=True, reason="gone"))
    assert isinstance(again[0], Dispatch)
    assert core.model_limits.requests("m") == 1


LIMITS = st.fixed_dictionaries(
    {}, optional={"max_requests": st.integers(1, 6), "max_queued_tokens": st.integers(1, 2_000)}
)


class LimitedWorld(RandomWorld):
    """A world that itself counts the running requests of workers and the ends of requests.
    Lifetime: test.
    """

    def __init__(self, policy: str, seed: int, limits: dict[str, dict[str, int]]) -> None:
        self.limits = {model: ModelLimit(**given) for model, given in limits.items()}
        self.rejected: Counter[int] = Counter()
        super().__init__(policy, seed)
        self.core.model_limits.limits = self.limits

    def tell(self, actions: list[Action]) -> None:
        super().tell(actions)
        self.rejected.update(one.request_id for one in actions if isinstance(one, Reject))

    def step(self) -> None:
        super().step()
        counted = Counter(self.open[number].model for number in self.at)
        for model in MODELS:
            limit = self.limits.get(model) or self.limits.get("*", ModelLimit())
            assert counted[model] == self.core.model_limits.requests(model)
            assert counted[model] <= limit.max_requests
            queued = self.core.admission.drain.queued_of(model)
            assert queued < limit.max_queued_tokens + PROMPT_MAX


@given(
    st.dictionaries(st.sampled_from([*MODELS, "*"]), LIMITS),
    st.sampled_from(["round_robin", "hybrid", "warmset?gate=0.01"]),
    st.integers(0, 10_000),
)
@settings(max_examples=examples(300), deadline=None)
def test_limits_hold_in_random_histories_and_each_request_ends_once(
    limits: dict[str, dict[str, int]], policy: str, seed: int
) -> None:
    world = LimitedWorld(policy, seed, limits)
    for _ in range(150):
        world.step()
    assert all(times == 1 for times in world.rejected.values())
    assert not world.rejected.keys() & world.open.keys()
    for number in list(world.open):
        world.leave(number)
    assert not any(world.core.model_limits.requests(model) for model in MODELS)
    assert world.core.admission.drain.queued_tokens == 0


@given(
    roles=st.lists(st.sampled_from(["prefill", "decode", "both"]), min_size=2, max_size=5),
    at_once=st.booleans(),
    most=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(ENDS), st.integers(0, 7)), max_size=60),
)
@settings(max_examples=examples(500), deadline=None)
def test_the_limit_holds_in_disaggregated_pools_in_random_histories(
    roles: list[str], at_once: bool, most: int, steps: list[tuple[str, int]]
) -> None:
    world = pool(*roles, concurrent=at_once)
    core, at, open_requests, next_worker = world.core, set[int](), list[int](), len(roles)
    core.model_limits.limits = {"m": ModelLimit(most)}

    def noted(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                at.add(action.request_id)
            elif isinstance(action, Cancel | Reject):
                at.discard(action.request_id)
            if isinstance(action, Reject):
                open_requests.remove(action.request_id)
        for action in actions:  # as who carries it to its worker does
            if isinstance(action, Cancel):
                noted(core.on_failure(Failure(world.now_s, action.request_id, "busy", retry=True)))

    def check_limit(actions: list[Action]) -> None:
        noted(actions)
        assert core.model_limits.requests("m") == len(at) <= most

    for what, which in steps:
        world.now_s += 0.05
        open_requests.append(world.next_id)
        check_limit(ask(world, list(range(which * 40, which * 40 + 60)))[1])
        number = open_requests[which % len(open_requests)] if open_requests else -1
        waits = number in core.held.requests()
        if what == "prefilled" and not waits:
            check_limit(prefilled(world, number))
        elif what == "first":
            check_limit(core.on_first_token(FirstToken(world.now_s, number)))
        elif what == "finish" and number in at:
            at.discard(number)
            open_requests.remove(number)
            check_limit(core.on_finish(Finish(world.now_s, number, None, None, 3)))
        elif what == "fail" and number in at:
            at.discard(number)
            fact = Failure(world.now_s, number, "worker", retry=True, reason="early_close")
            check_limit(core.on_failure(fact))
        elif what == "leave" and open_requests:
            at.discard(number)
            open_requests.remove(number)
            check_limit(core.on_failure(Failure(world.now_s, number, "client")))
        elif what == "gone" and core.workers.get(which) is not None:
            check_limit(core.on_worker(WorkerChange(world.now_s, which, "gone")))
        elif what == "join" and next_worker < 8 and len(core.workers) < 8:
            world.join(next_worker, role=roles[which % len(roles)], **SLOW)
            next_worker += 1
    for number in list(open_requests):
        at.discard(number)
        open_requests.remove(number)
        check_limit(core.on_failure(Failure(world.now_s, number, "client")))
    assert_empty(world)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m", "is not MODEL"),
        ("m:", "is not MODEL"),
        (":max_requests=1", "is not MODEL"),
        ("m:max_request=1", "each once: max_requests, max_queued_tokens"),
        ("m:max_requests=1,max_requests=2", "each once"),
        ("m:max_requests=0", "must be 1.."),
        ("m:max_requests=" + "9" * 5_000, "must be 1.."),
        ("m:max_requests=1.5", "must be 1.."),
    ],
)
def test_invalid_limit_lines_are_rejected(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_limits([line])


def test_limit_lines_accept_any_model_name() -> None:
    found = model_limits(["a:b/c:max_requests=3", "d:max_queued_tokens=9, max_requests=2"])
    assert found == {"a:b/c": ModelLimit(3), "d": ModelLimit(2, 9)}
    with pytest.raises(ValueError, match="twice"):
        model_limits(["a:max_requests=3", "a:max_requests=4"])
