"""Tests of requests sent to a prefill and a decode worker at once: both are charged, one failure
ends both, and every charge ends.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Prefilled, WorkerChange
from router.core.contract.actions import Action, Cancel, Dispatch, Reject
from router.core.core import RequestListener
from router.core.placement.disaggregation import PairFaults
from router.core.placement.pending import Pending
from router.core.workers.ledger import Charge
from router.core.workers.table import Worker
from tests.router.core.core_world import BLOCK, World
from tests.router.property_support import patient
from tests.router.record.record_play_support import RecordedDispatcher, arrival
from tests.router.replicas.replica_world import Replicas

LONG = list(range(500))
PROMPT = len(LONG) * BLOCK
PAIR = {
    "prefill_tokens_per_s": 1_000.0,
    "group": "g",
    "serves_alone": False,
    "concurrent": True,
    "keeps_prefixes": False,
}


class RecordingListener(RequestListener):
    """Records the messages that peer routers would get. Lifetime: test."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, str], int] = {}  # request and leg -> worker
        self.sent = 0

    def dispatched(self, pending: Pending, charge: Charge, worker: Worker) -> None:
        key = charge.request_id, charge.leg
        assert key not in self.open
        assert charge.request_id == pending.arrival.request_id
        self.open[key] = worker.worker_id
        self.sent += 1

    def ended(self, charge: Charge, finish: Finish | None) -> None:
        del self.open[charge.request_id, charge.leg]


def pool(*roles: str, **facts: object) -> World:
    """Return a world with one worker for each of the given roles."""
    world = World(workers=0)
    for worker_id, role in enumerate(roles):
        world.join(worker_id, role=role, **PAIR | facts)
    world.core.listener = RecordingListener()
    return world


def ask(world: World, blocks: list[int] = LONG, **fields: object) -> tuple[int, list[Action]]:
    arrival = world.arrival(blocks, splits=True, **fields)
    return arrival.request_id, world.core.on_arrival(arrival)


def pairs(actions: list[Action]) -> list[tuple[int, int]]:
    """Return the prefill worker and the decode worker of each dispatch."""
    found = []
    for action in actions:
        if isinstance(action, Dispatch):
            first, second = action.stages
            assert (first.role, second.role) == ("prefill", "decode")
            assert action.prefill is not None
            assert action.worker_id == second.worker_id
            found.append((first.worker_id, second.worker_id))
    return found


def failure(world: World, number: int, leg: str, retry: bool = True) -> Failure:
    world.now_s += 0.01
    fields = {"blame": "worker", "retry": retry, "reason": "early_close", "leg": leg}
    return Failure(world.now_s, number, **fields)  # type: ignore[arg-type]


def assert_empty(world: World) -> None:
    columns = world.core.columns
    for name in ("requests", "waiting", "context_tokens", "decode_place_tokens"):
        assert not getattr(columns, name).any(), name
    assert np.array_equal(columns.charged_work, columns.drained_work)
    assert not world.core.inflight_requests
    assert not len(world.core.ledger)
    assert not world.core.listener.open, "peers believe that it is there still"
    assert world.core.admission.drain.queued_tokens == 0


def test_the_prefill_and_the_decode_worker_are_charged_at_once() -> None:
    world = pool("prefill", "decode")
    number, actions = ask(world)
    assert pairs(actions) == [(0, 1)]
    columns = world.core.columns
    assert columns.requests.tolist()[:2] == [1, 1]
    assert columns.queued_tokens(slice(0, 2)).tolist() == [PROMPT, 1.0]
    assert columns.context_tokens[1] == PROMPT, "room for its KV is taken from the start"
    world.core.on_prefilled(Prefilled(1.0, number, 0))
    assert columns.requests.tolist()[:2] == [0, 1]
    world.core.on_first_token(FirstToken(1.0, number))
    assert columns.context_tokens[1] == PROMPT + 1
    world.core.on_finish(Finish(2.0, number, PROMPT, 0, 10))
    assert_empty(world)


def test_the_first_token_ends_the_prefill_charge() -> None:
    world = pool("prefill", "decode")
    before = (
        world.core.columns.prefill_tokens_per_s.tolist(),
        world.core.disaggregation.tokens_per_s,
    )
    number, _ = ask(world)
    world.core.on_first_token(FirstToken(9.0, number))
    assert world.core.columns.requests.tolist()[:2] == [0, 1]
    world.core.on_prefilled(Prefilled(9.5, number, 0))
    after = world.core.columns.prefill_tokens_per_s.tolist(), world.core.disaggregation.tokens_per_s
    assert after == before, "a late answer tells of no speed"
    world.core.on_finish(Finish(10.0, number, PROMPT, 0, 10))
    assert_empty(world)


@pytest.mark.parametrize(("refused", "hit_tokens"), [(False, PROMPT - BLOCK), (True, 0)])
def test_a_refused_pair_leaves_no_prefill_in_a_cache(refused: bool, hit_tokens: int) -> None:
    world = pool("prefill", "decode", keeps_prefixes=True)
    number, _ = ask(world)
    world.core.on_finish(Finish(2.0, number, None, None, None, refused))
    assert_empty(world)
    _, (action,) = ask(world)
    assert isinstance(action, Dispatch)
    assert action.prefill is not None
    assert action.prefill.hit_tokens >= hit_tokens
    assert bool(action.prefill.hit_tokens) is not refused


def test_no_hits_are_expected_in_a_decode_cache_that_keeps_no_prefixes() -> None:
    world = pool("prefill", "decode", has_events=False)
    number, _ = ask(world)
    world.core.on_first_token(FirstToken(1.0, number))
    world.core.on_finish(Finish(2.0, number, PROMPT, 0, 10))
    _, (dispatch,) = ask(world)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.prefill is not None
    assert dispatch.decision.hit_tokens == 0
    assert dispatch.prefill.hit_tokens > 0, "it is where it was prefilled"


@pytest.mark.parametrize(("leg", "failed"), [("prefill", 0), ("answer", 1)])
def test_a_failure_counts_for_the_failed_leg_and_cancels_the_other_leg(
    leg: str, failed: int
) -> None:
    world = pool("prefill", "decode", "prefill", "decode")
    number, actions = ask(world)
    (first,) = pairs(actions)
    actions = world.core.on_failure(failure(world, number, leg))
    (again,) = pairs(actions)
    assert again[failed] != first[failed], "another worker in its place"
    cancelled = [a.worker_id for a in actions if isinstance(a, Cancel)]
    assert cancelled == [first[1 - failed]]
    failures = {w.worker_id: w.health.failures for w in world.core.workers}
    assert [one for one, count in failures.items() if count] == [first[failed]]
    world.core.on_finish(Finish(1.0, number, PROMPT, 0, 10))
    assert_empty(world)


def test_a_prefill_failure_after_the_first_token_is_only_counted() -> None:
    world = pool("prefill", "decode")
    number, _ = ask(world)
    world.core.on_first_token(FirstToken(0.5, number))
    assert world.core.on_failure(failure(world, number, "prefill", retry=False)) == []
    assert [w.health.failures for w in world.core.workers] == [1, 0]
    assert world.core.inflight_requests == 1
    world.core.on_finish(Finish(1.0, number, PROMPT, 0, 10))
    assert_empty(world)


def test_a_failed_transfer_counts_against_no_worker_at_first() -> None:
    world = pool("prefill", "decode", "decode")
    number, actions = ask(world)
    ((_, broken),) = pairs(actions)
    actions = world.core.on_failure(failure(world, number, "pair"))
    ((_, other),) = pairs(actions)
    assert other != broken
    assert not any(w.health.failures for w in world.core.workers)
    world.core.on_first_token(FirstToken(world.now_s, number))
    world.core.on_finish(Finish(world.now_s, number, PROMPT, 0, 10))
    for _ in range(3):
        number, actions = ask(world)
        ((_, chosen),) = pairs(actions)
        leg = "pair" if chosen == broken else "answer"
        if leg == "pair":
            world.core.on_failure(failure(world, number, leg))
        world.core.on_finish(Finish(world.now_s, number, PROMPT, 0, 10))
    failures = {w.worker_id: w.health.failures for w in world.core.workers}
    assert failures[0] == failures[other] == 0, "no healthy one is blamed for the other"


def test_a_failed_transfer_is_retried_at_the_only_pair_with_a_new_room() -> None:
    world = pool("prefill", "decode")
    number, _ = ask(world)
    assert pairs(world.core.on_failure(failure(world, number, "pair"))) == [(0, 1)]
    world.core.on_failure(Failure(1.0, number, "client"))
    assert_empty(world)


def late(world: World, number: int, leg: str, reason: str, waited_s: float = 300.0) -> Failure:
    world.now_s += waited_s
    fields = {"blame": "worker", "retry": True, "reason": reason, "leg": leg}
    return Failure(world.now_s, number, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize(
    ("reason", "waited_s"),
    [("status_5xx", 300.0), ("timeout_first_byte", 600.0), ("transfer_timeout", 0.5)],
)
def test_a_transfer_that_timed_out_is_not_retried_at_another_pair(
    pools: int, reason: str, waited_s: float
) -> None:
    world = pool(*("prefill", "decode") * pools)
    number, _ = ask(world)
    (refused,) = [
        action
        for action in world.core.on_failure(late(world, number, "pair", reason, waited_s))
        if isinstance(action, Reject)
    ]
    assert (refused.status, refused.code) == (502, "worker_error")
    assert "KV did not come" in refused.message
    assert_empty(world)


def test_a_timed_out_transfer_is_retried_at_a_single_worker() -> None:
    world = pool("prefill", "decode", "prefill", "decode")
    world.join(4, prefill_tokens_per_s=1_000.0)
    number, actions = ask(world)
    assert len(pairs(actions)) == 1
    actions = world.core.on_failure(late(world, number, "pair", "status_5xx"))
    (again,) = [action for action in actions if isinstance(action, Dispatch)]
    assert [(stage.worker_id, stage.role) for stage in again.stages] == [(4, "both")]
    world.core.on_finish(Finish(world.now_s, number, PROMPT, 0, 10))
    assert_empty(world)


def test_a_worker_that_fails_with_several_partners_is_at_fault() -> None:
    faults = PairFaults()
    assert faults.failed(1, 11, 0.0) == []
    assert faults.failed(2, 11, 1.0) == [11]
    assert faults.failed(2, 12, 2.0) == [2]
    faults.served(2, 11, 3.0)
    faults.served(1, 11, 3.0)
    faults.forget_worker(2)
    assert faults.failed(1, 11, 4.0) == []


def test_a_worker_whose_partner_serves_with_another_worker_is_at_fault() -> None:
    faults = PairFaults()
    assert faults.failed(1, 11, 0.0) == []
    faults.served(1, 12, 1.0)
    assert faults.failed(1, 11, 2.0) == [11]


@pytest.mark.parametrize(("roles", "missing"), [("p", "decodes"), ("d", "prefills")])
def test_a_pool_without_prefill_or_decode_workers_names_the_missing_role(
    roles: str, missing: str
) -> None:
    names = {"p": "prefill", "d": "decode"}
    (refused,) = ask(pool(*(names[one] for one in roles)))[1]
    assert isinstance(refused, Reject)
    assert refused.status == 503
    assert f"no worker of model 'm' {missing}" in refused.message


def test_a_request_that_cannot_be_split_is_rejected_with_the_reason() -> None:
    world = pool("prefill", "decode")
    (refused,) = world.core.on_arrival(world.arrival(LONG))
    assert isinstance(refused, Reject)
    assert "not for two" in refused.message


def test_an_answer_of_one_token_is_split_if_no_worker_serves_alone() -> None:
    assert pairs(ask(pool("prefill", "decode"), max_output_tokens=1)[1]) == [(0, 1)]


def test_a_revision_with_only_one_role_gets_no_requests() -> None:
    """A revision that has only prefill or only decode workers, as at the beginning of a rollout,
    gets no request.
    """
    world = pool("prefill", "decode")
    world.join(2, role="decode", **PAIR | {"group": "new"})
    for _ in range(4):
        assert pairs(ask(world)[1]) == [(0, 1)]


def test_a_request_that_failed_at_every_decode_worker_is_rejected_with_502() -> None:
    world = pool("prefill", "decode")
    number, _ = ask(world)
    actions = world.core.on_failure(failure(world, number, "answer"))
    (refused,) = [action for action in actions if isinstance(action, Reject)]
    assert (refused.status, refused.code) == (502, "worker_error")
    assert_empty(world)


def test_another_revision_serves_if_the_only_prefill_worker_failed() -> None:
    world = pool("prefill", "decode")
    for worker_id, role in ((2, "prefill"), (3, "decode")):
        world.join(worker_id, role=role, **PAIR | {"group": "new"})
    number, actions = ask(world)
    ((prefill_id, _),) = pairs(actions)
    ((other_id, other),) = pairs(world.core.on_failure(failure(world, number, "prefill")))
    assert {prefill_id, other_id} == {0, 2}
    assert other == other_id + 1


@pytest.mark.parametrize("gone", [0, 1])
def test_a_worker_that_leaves_releases_its_charge(gone: int) -> None:
    world = pool("prefill", "decode", "prefill", "decode")
    number, actions = ask(world)
    (first,) = pairs(actions)
    actions = world.core.on_worker(WorkerChange(0.1, first[gone], "gone"))
    assert Cancel(number, first[gone], "worker removed") in actions
    leg = "prefill" if gone == 0 else "answer"
    (again,) = pairs(world.core.on_failure(failure(world, number, leg)))
    assert first[gone] not in again
    assert not any(w.health.failures for w in world.core.workers)
    world.core.on_finish(Finish(1.0, number, PROMPT, 0, 10))
    assert_empty(world)


FAILS = ("prefill", "answer", "pair")
ENDS = ("prefilled", "first", "finish", *FAILS, "late", "leave", "gone", "join")


@patient
@given(
    roles=st.lists(st.sampled_from(["prefill", "decode"]), min_size=2, max_size=5),
    steps=st.lists(st.tuples(st.sampled_from(ENDS), st.integers(0, 7)), max_size=60),
    stream=st.booleans(),
)
def test_both_charges_are_released_once_in_random_histories(
    roles: list[str], steps: list[tuple[str, int]], stream: bool
) -> None:
    world = pool(*roles)
    core, open_requests, next_worker = world.core, [], len(roles)
    for what, which in steps:
        world.now_s += 0.05
        blocks = list(range(which * 40, which * 40 + 60))
        number, actions = ask(world, blocks, stream=stream)
        if not any(isinstance(action, Reject) for action in actions):
            open_requests.append(number)
        number = open_requests[which % len(open_requests)] if open_requests else -1
        if what == "prefilled":
            actions = core.on_prefilled(Prefilled(world.now_s, number, 0))
        elif what == "first":
            core.on_first_token(FirstToken(world.now_s, number))
        elif what == "finish":
            core.on_finish(Finish(world.now_s, number, None, None, 3))
        elif what in FAILS:
            actions = core.on_failure(failure(world, number, what))
        elif what == "late":
            actions = core.on_failure(failure(world, number, "prefill", retry=False))
        elif what == "leave":
            core.on_failure(Failure(world.now_s, number, "client"))
        elif what == "gone" and core.workers.get(which) is not None:
            actions = core.on_worker(WorkerChange(world.now_s, which, "gone"))
        elif what == "join" and next_worker < 8 and len(core.workers) < 8:
            world.join(next_worker, role=roles[which % len(roles)], **PAIR)
            next_worker += 1
        for pair in pairs(actions):
            assert all(core.workers.get(one) is not None for one in pair)
        assert len(core.ledger) == len(core.listener.open)
        assert core.columns.requests.sum() == len(core.ledger), "a charge for each, and no other"
    for number in open_requests:
        core.on_failure(Failure(world.now_s, number, "client"))
    assert_empty(world)


@patient
@given(steps=st.lists(st.tuples(st.sampled_from((*ENDS, "ask")), st.integers(0, 7)), max_size=30))
def test_a_recording_of_concurrent_legs_plays_back(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk, count = RecordedDispatcher(Path(folder) / "facts"), 0
        for worker_id, role in enumerate(("prefill", "decode", "prefill", "decode")):
            desk.join(worker_id, role=role, **PAIR)
        for what, number in steps:
            desk.now_s += 0.05
            now_s = desk.now_s
            if what == "ask":
                desk.tell(arrival(now_s, count, [number, 1, 2], splits=True))
                count += 1
            elif what == "prefilled":
                desk.tell(Prefilled(now_s, number, 0))
            elif what == "first":
                desk.tell(FirstToken(now_s, number))
            elif what == "finish":
                desk.tell(Finish(now_s, number, None, None, 3))
            elif what == "gone":
                desk.tell(WorkerChange(now_s, number, "gone"))
            elif what == "leave":
                desk.tell(Failure(now_s, number, "client"))
            elif what in (*FAILS, "late"):
                leg = "prefill" if what == "late" else what
                fields = {"blame": "worker", "retry": what != "late", "reason": "x", "leg": leg}
                desk.tell(Failure(now_s, number, **fields))  # type: ignore[arg-type]
        desk.played()


def test_replicas_see_both_charges_and_their_ends() -> None:
    peers = Replicas(2, workers=0)
    one, other = peers.replicas.values()
    for replica in (one, other):
        for worker_id, role in enumerate(("prefill", "decode")):
            replica.world.join(worker_id, role=role, **PAIR)
    peers.settle()
    number = one.arrive(LONG, splits=True).request_id
    columns = [replica.world.core.columns for replica in (one, other)]

    def seen() -> list[list[float]]:
        peers.settle()
        return [
            [*c.requests[:2].tolist(), *c.waiting[:2].tolist(), *c.context_tokens[:2].tolist()]
            for c in columns
        ]

    assert seen() == [[1, 1, 1, 1, 0.0, PROMPT]] * 2
    one.world.core.on_prefilled(Prefilled(peers.now_s, number, 0))
    assert seen() == [[0, 1, 0, 1, 0.0, PROMPT]] * 2
    one.world.core.on_first_token(FirstToken(peers.now_s, number))
    peers.settle()
    assert columns[1].waiting[:2].tolist() == [0, 0]
    one.end(number, "finish")
    assert seen() == [[0, 0, 0, 0, 0.0, 0.0]] * 2
    assert other.world.core.caches.speculative is not None
    hits = [c.world.core.explain(c.world.arrival(LONG, splits=True)) for c in (one, other)]
    assert [hit.worker.worker_id for hit in hits] == [0, 0]  # type: ignore[union-attr]
