"""Tests of requests that one worker prefills and another decodes: the choice of workers, and the
end of every charge.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import (
    Failure,
    Finish,
    FirstToken,
    LoadReport,
    Tick,
    WorkerChange,
)
from router.core.contract.actions import Dispatch, Hold, Reject
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
from tests.router.property_support import patient


def busy(world: World, worker_id: int, requests: int = 4) -> None:
    """Let a worker decode `requests` other requests."""
    columns = world.core.columns
    columns.requests[world.core.workers.get(worker_id).slot] += requests


def test_one_worker_prefills_and_another_worker_decodes() -> None:
    world = pool("prefill", "decode")
    busy(world, 1)
    number, actions = ask(world)
    assert legs(actions) == [(0, "prefill")]
    columns = world.core.columns
    assert columns.requests.tolist()[:2] == [1, 5], "its place at the worker that decodes is kept"
    assert columns.context_tokens[1] == len(LONG) * BLOCK
    assert legs(prefilled(world, number)) == [(1, "decode")]
    assert columns.requests.tolist()[:2] == [0, 5]
    assert columns.queued_tokens(slice(0, 2)).tolist() == [0.0, 1.0]
    world.core.on_first_token(FirstToken(world.now_s + 0.1, number))
    world.core.on_finish(Finish(world.now_s + 1.0, number, len(LONG) * BLOCK, 0, 10))
    columns.requests[1] -= 4
    columns.context_tokens[1] = 0.0
    assert_empty(world)


def test_a_prefill_restarts_if_its_worker_is_removed_as_it_ends() -> None:
    """A prefill whose worker was removed just as the prefill ended starts again at
    another worker.
    """
    world = pool("prefill", "prefill", "decode")
    busy(world, 2)
    number, actions = ask(world)
    ((first, _),) = legs(actions)
    world.core.on_worker(WorkerChange(world.now_s, first, "gone"))
    assert legs(prefilled(world, number)) == [(1 - first, "prefill")]
    assert legs(prefilled(world, number)) == [(2, "decode")]


def test_an_idle_decode_worker_serves_the_complete_request() -> None:
    """An idle decode worker does the whole request: a prefill there disturbs no other request, and
    no KV has to be moved.
    """
    assert legs(ask(pool("prefill", "decode"))[1]) == [(1, "both")]


def test_a_prompt_cached_at_the_decode_worker_is_prefilled_there() -> None:
    world = pool("prefill", "decode")
    number, _ = ask(world)
    world.core.on_finish(Finish(1.0, number, len(LONG) * BLOCK, 0, 10))
    busy(world, 1, 1)
    assert legs(ask(world, [*LONG, 1_000])[1]) == [(1, "both")]
    assert legs(ask(world, list(range(2_000, 2_500)))[1]) == [(0, "prefill")]


def test_decode_workers_take_short_prefills_within_the_tpot_allowance() -> None:
    """Decode workers take short prefills until the allowed growth of their time per token is used
    up; with time the allowance recovers.
    """
    world = World(workers=0, tpot_s=0.05)
    for worker_id, role in enumerate(("prefill", "decode")):
        world.join(worker_id, role=role, group="g")
    busy(world, 1)

    def placed_at(serial: int) -> tuple[int, str]:
        number, actions = ask(world, list(range(1_000 * serial, 1_000 * serial + 8)))
        (leg,) = legs(actions)
        if leg[1] == "both":
            world.core.on_finish(Finish(world.now_s, number, 8 * BLOCK, 0, 10))
        else:
            world.core.on_failure(Failure(world.now_s, number, "client"))
        return leg

    done = [placed_at(serial) for serial in range(1, 400)]
    assert done[0] == (1, "both")
    beside = done.count((1, "both"))
    assert beside < len(done)
    assert done == [(1, "both")] * beside + [(0, "prefill")] * (len(done) - beside)
    world.now_s += 60.0
    assert placed_at(500) == (1, "both")


def test_only_requests_that_may_be_split_are_split() -> None:
    world = pool("prefill", "decode")
    busy(world, 1)
    arrival = world.arrival(LONG)
    assert legs(world.core.on_arrival(arrival)) == [(1, "both")]


def test_an_answer_of_one_token_is_not_split() -> None:
    world = pool("prefill", "decode")
    busy(world, 1)
    assert legs(ask(world, max_output_tokens=1)[1]) == [(1, "both")]


def test_a_failed_prefill_is_retried_and_counts_against_its_worker_only() -> None:
    world = pool("prefill", "prefill", "decode")
    busy(world, 2)
    number, actions = ask(world)
    ((first, _),) = legs(actions)
    fact = Failure(0.1, number, "worker", retry=True, reason="early_close")
    assert legs(world.core.on_failure(fact)) == [(1 - first, "prefill")]
    failures = [w.health.failures for w in world.core.workers]
    assert failures[first] == 1
    assert sum(failures) == 1


def test_a_decode_that_fails_before_its_first_byte_restarts_with_prefill() -> None:
    """If decode fails before its first byte, the request starts again with the prefill, because the
    KV may have been read already and its blocks reused.
    """
    world = pool("prefill", "decode", "decode")
    busy(world, 1)
    busy(world, 2)
    number, _ = ask(world)
    ((worker_id, _),) = legs(prefilled(world, number))
    fact = Failure(world.now_s, number, "worker", retry=True, reason="early_close")
    assert legs(world.core.on_failure(fact)) == [(0, "prefill")]
    assert legs(prefilled(world, number)) == [(3 - worker_id, "decode")]


@pytest.mark.parametrize("reason", ["timeout_first_byte", "status_5xx"])
def test_a_decode_whose_kv_never_arrived_is_retried_at_a_single_worker(reason: str) -> None:
    world = pool("prefill", "decode", "decode")
    busy(world, 1)
    busy(world, 2)
    number, _ = ask(world)
    ((worker_id, _),) = legs(prefilled(world, number))
    world.now_s += 480.0
    fact = Failure(world.now_s, number, "worker", retry=True, reason=reason)
    assert legs(world.core.on_failure(fact)) == [(3 - worker_id, "both")]


def test_a_decode_worker_that_leaves_is_replaced_within_its_group() -> None:
    world = pool("prefill", "decode", "decode")
    world.join(3, role="decode", **SLOW | {"group": "another"})
    for worker_id in (1, 2, 3):
        busy(world, worker_id)
    number, _ = ask(world)
    promised = next(w for w in world.core.workers if world.core.ledger.decode_places_at(w.slot))
    world.core.on_worker(WorkerChange(0.5, promised.worker_id, "gone"))
    assert legs(prefilled(world, number)) == [(3 - promised.worker_id, "decode")]


def test_the_request_restarts_at_another_pair_if_its_group_is_empty() -> None:
    world = pool("prefill", "decode")
    busy(world, 1)
    number, _ = ask(world)
    world.join(2, role="prefill", **SLOW | {"group": "another"})
    world.join(3, role="decode", **SLOW | {"group": "another"})
    busy(world, 3)
    world.core.on_worker(WorkerChange(0.5, 1, "gone"))
    assert legs(prefilled(world, number)) == [(2, "prefill")]


def test_a_pool_of_one_role_serves_if_its_engine_can_and_else_rejects() -> None:
    for role, missing in (("prefill", "decodes"), ("decode", "prefills")):
        assert legs(ask(pool(role))[1]) == [(0, "both")]
        (refused,) = ask(pool(role, serves_alone=False))[1]
        assert isinstance(refused, Reject)
        assert refused.status == 503
        assert f"no worker of model 'm' {missing}" in refused.message


def test_the_rejection_lists_the_groups_if_no_pair_shares_a_group() -> None:
    world = World(workers=0)
    for worker_id, role in enumerate(("prefill", "decode")):
        world.join(worker_id, role=role, group=f"g{worker_id}", serves_alone=False)
    (refused,) = ask(world)[1]
    assert isinstance(refused, Reject)
    assert "their groups are g0, g1" in refused.message


def test_an_answer_that_ends_with_its_first_token_leaves_no_charge() -> None:
    world = pool("prefill", "decode")
    busy(world, 1)
    number, _ = ask(world)
    world.core.on_finish(Finish(1.0, number, len(LONG) * BLOCK, 0, 1))
    columns = world.core.columns
    columns.requests[1] -= 4
    assert_empty(world)


def fills(world: World, worker_id: int, kv_tokens: float) -> None:
    world.core.on_load_report(LoadReport(world.now_s, worker_id, 4, 0, kv_tokens))


def test_no_prefill_starts_if_no_decode_worker_has_room_for_the_kv() -> None:
    prompt = len(LONG) * BLOCK
    world = pool("prefill", "decode", "decode", kv_capacity_tokens=3 * prompt)
    busy(world, 1)
    busy(world, 2)
    fills(world, 1, 2.5 * prompt)
    fills(world, 2, 1.5 * prompt)
    first, actions = ask(world)
    assert legs(actions) == [(0, "prefill")]
    fills(world, 2, 1.5 * prompt)  # it knows nothing of the prompt that will come
    _, actions = ask(world, [block + 1_000 for block in LONG])
    assert [type(action) for action in actions] == [Hold]
    fills(world, 1, 0.5 * prompt)
    assert legs(world.core.on_tick(Tick(world.now_s))) == [(0, "prefill")]
    assert legs(prefilled(world, first)) == [(2, "decode")]


def test_a_prompt_larger_than_the_room_is_sent_to_an_idle_worker() -> None:
    world = pool("prefill", "decode", kv_capacity_tokens=len(LONG) * BLOCK)
    world.core.on_load_report(LoadReport(world.now_s, 1, 0, 0, 1_000.0))
    assert [type(action) for action in ask(world)[1]] == [Dispatch]


@patient
@given(
    roles=st.lists(st.sampled_from(["prefill", "decode", "both"]), min_size=2, max_size=5),
    steps=st.lists(st.tuples(st.sampled_from(ENDS), st.integers(0, 7)), max_size=60),
)
def test_every_charge_is_released_once_in_random_histories(
    roles: list[str], steps: list[tuple[str, int]]
) -> None:
    world = pool(*roles)
    core, open_requests, next_worker = world.core, [], len(roles)
    for what, which in steps:
        world.now_s += 0.05
        number, actions = ask(world, list(range(which * 40, which * 40 + 60)))
        if not any(isinstance(action, Reject) for action in actions):
            open_requests.append(number)
        number = open_requests[which % len(open_requests)] if open_requests else -1
        if what == "prefilled":
            actions = prefilled(world, number)
        elif what == "first":
            core.on_first_token(FirstToken(world.now_s, number))
        elif what == "finish":
            core.on_finish(Finish(world.now_s, number, None, None, 3))
        elif what == "fail":
            fact = Failure(world.now_s, number, "worker", retry=True, reason="early_close")
            actions = core.on_failure(fact)
        elif what == "leave":
            core.on_failure(Failure(world.now_s, number, "client"))
        elif what == "gone" and core.workers.get(which) is not None:
            actions = core.on_worker(WorkerChange(world.now_s, which, "gone"))
        elif what == "join" and next_worker < 8 and len(core.workers) < 8:
            world.join(next_worker, role=roles[which % len(roles)], **SLOW)
            next_worker += 1
        for action in actions:
            if isinstance(action, Dispatch):
                assert core.workers.get(action.worker_id) is not None
    for number in open_requests:
        core.on_failure(Failure(world.now_s, number, "client"))
    assert_empty(world)
