"""Tests of session tracking: every tracked request ends exactly once, whatever happens to it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvkernels import chain_hashes
from policies.contract import FleetView, Floats, RequestView
from policies.facts import Failure, Finish, FirstToken, LoadReport, Tick, WorkerChange
from policies.load import load
from router.core.contract.actions import Dispatch, Hold, Reject
from router.core.placement.choice import Choice, Withheld
from tests.effort import EFFORT
from tests.router.core.core_world import BLOCK, World, chain_of, stored
from tests.router.core.random_world import RandomWorld

SEEN: list[RequestView] = []


class Watching:
    """A policy that keeps the data of each decision, and chooses the worker with the fewest
    requests, at most two.
    """

    needs_sessions = True

    def costs(self, request: RequestView, fleet: FleetView, state: object) -> Floats:
        SEEN.append(request)
        costs = fleet.requests + fleet.working_set_tokens / 1e6
        costs[fleet.worker_id == request.home_id] = -1.0
        return np.where(fleet.requests < 3, costs, np.inf)


WATCHING = f"{__name__}:Watching"
SYSTEM = list(range(900, 912))


@pytest.fixture(autouse=True)
def clear_seen() -> None:
    SEEN.clear()


def check(world: RandomWorld) -> None:
    """Check that no tracked request is lost or counted twice."""
    core = world.core
    sessions = core.session_tracking.sessions
    assert sessions is not None
    rows = sessions._rows
    tracked = Counter(pending.tracked.row for pending in core._pending.values() if pending.tracked)
    assert sum(tracked.values()) == core.inflight_requests == len(world.open)
    alive = [row for row in range(rows.used) if rows.serial[row]]
    assert {row: int(rows.inflight[row]) for row in alive} == {row: tracked[row] for row in alive}
    slots = {worker.slot for worker in core.workers}
    assert {int(rows.home[row]) for row in alive} <= slots | {-1}
    assert len(core.ledger) == len(world.at)
    assert sum(core.held.standings().values()) == core.held_requests


@pytest.mark.parametrize("seed", range(3 * EFFORT))
@pytest.mark.parametrize("policy", [WATCHING, "warmset?gate=0.01"])
def test_every_charge_and_tracked_request_ends_once_in_a_random_world(
    policy: str, seed: int
) -> None:
    world = RandomWorld(policy, seed)
    tracked = world.core.session_tracking.sessions
    assert tracked is not None
    tracked.cycle.returned(1.0)
    tracked.cycle.answered(10)
    for _ in range(400):
        world.core.columns.prefill_tokens_per_s[:] = 10.0  # who has no room had better wait
        world.step()
        if world.open and world.rng.random() < 0.05:
            world.leave(world.rng.choice(list(world.open)))
        check(world)
    assert world.core.counters.holds > 0
    for request_id in list(world.open):
        world.leave(request_id)
    for _ in range(3):
        world.now_s += 1_000.0
        world.tell(world.core.on_tick(Tick(world.now_s)))
    check(world)
    sessions = world.core.session_tracking.sessions
    assert sessions is not None
    assert len(sessions) == sessions.sets.trunks == 0
    sets = sessions.sets
    assert not any(
        column.any() for column in (sets.private_tokens, sets.cold_work, sets.trunk_tokens)
    )


def test_sessions_are_not_tracked_for_a_policy_that_does_not_use_them() -> None:
    world = World(policy="hybrid")
    world.core.on_arrival(world.arrival([1, 2], session="a"))
    assert world.core.session_tracking.sessions is None
    assert all(pending.tracked is None for pending in world.core._pending.values())


def test_a_new_policy_sees_the_sessions_of_running_requests() -> None:
    world = World(workers=2, policy="hybrid")
    running = world.arrival([1, 2, 3, 4, 5, 6, 7], session="a")
    (sent,) = world.core.on_arrival(running)
    assert isinstance(sent, Dispatch)
    world.core.set_policy(load(WATCHING))
    world.core.on_finish(Finish(1.0, running.request_id, output_tokens=5))
    again = world.arrival([1, 2, 3, 4, 5, 6, 7, 8], session="a", now_s=2.0)
    (action,) = world.core.on_arrival(again)
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("warm", sent.worker_id)
    assert isinstance(action, Dispatch)
    assert action.worker_id == sent.worker_id


def test_changing_the_policy_back_and_forth_keeps_session_counts_correct() -> None:
    world = World(workers=1, policy=WATCHING)
    for number in range(9):  # three run, six wait
        world.core.on_arrival(world.arrival([number] * 8, session=f"s{number}"))
    assert world.core.held_requests == 6
    first = world.core.session_tracking.sessions
    world.core.set_policy(load("hybrid"))
    world.core.set_policy(load(WATCHING))
    sessions = world.core.session_tracking.sessions
    assert sessions is not None
    assert sessions is not first
    assert sessions.count() == (9, 0)
    for request_id in range(1, 10):
        world.core.on_failure(Failure(1.0, request_id, "client"))
    # Those that were sent are remembered, those that never were are not.
    assert sessions.count()[0] == world.core.inflight_requests == 0
    world.core.on_tick(Tick(5_000.0))
    assert len(sessions) == 0


def test_an_explanation_sees_the_session_and_changes_no_record() -> None:
    world = World(workers=2, policy=WATCHING)
    (sent,) = world.core.on_arrival(first := world.arrival(list(range(8)), session="a"))
    assert isinstance(sent, Dispatch)
    world.core.on_finish(Finish(0.5, first.request_id, output_tokens=3))
    sessions = world.core.session_tracking.sessions
    assert sessions is not None
    before = (len(sessions), sessions.count(), len(sessions.owners))
    rows = sessions._rows
    columns = [column.copy() for column in vars(rows).values() if isinstance(column, np.ndarray)]
    for session, blocks in (("a", [*range(8), 20]), ("new", [30, 31]), (None, [*range(8), 40])):
        choice = world.core.explain(world.arrival(blocks, session=session, now_s=1.0))
        assert isinstance(choice, Choice)
        if session == "new":
            assert (SEEN[-1].standing, SEEN[-1].home_id) == ("new", -1)
        else:
            assert (SEEN[-1].standing, SEEN[-1].home_id) == ("warm", sent.worker_id)
            assert choice.worker.worker_id == sent.worker_id
    assert before == (len(sessions), sessions.count(), len(sessions.owners))
    now = [column for column in vars(rows).values() if isinstance(column, np.ndarray)]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(columns, now, strict=True))


def test_explanations_change_no_later_action() -> None:
    plain, explained = (RandomWorld("warmset?gate=0.01", 5) for _ in range(2))
    for number in range(500):
        plain.step()
        explained.step()
        if explained.open and number % 3 == 0:
            arrival = next(reversed(explained.open.values()))
            explained.core.explain(arrival)
            explained.core.explain_held(arrival.request_id, explained.now_s)
    assert plain.digest.hexdigest() == explained.digest.hexdigest()


def test_the_explanation_of_a_held_request_shows_the_hold() -> None:
    world = World(workers=1, policy=WATCHING)
    for number in range(3):
        world.core.on_arrival(world.arrival([number] * 3))
    held = world.arrival([9] * 3)
    assert isinstance(world.core.on_arrival(held)[0], Hold)
    assert isinstance(world.core.explain_held(held.request_id, 1.0), Withheld)


# --- standings ----------------------------------------------------------------------------------


def test_both_held_requests_of_a_new_session_are_new() -> None:
    world = World(workers=1, policy=WATCHING)
    for number in range(3):
        world.core.on_arrival(world.arrival([number] * 8))
    for number in (5, 6):
        assert isinstance(world.core.on_arrival(world.arrival([number] * 8, session="a"))[0], Hold)
        assert SEEN[-1].standing == "new"


def test_a_session_whose_worker_left_is_cold_and_precedes_new_sessions() -> None:
    world = World(workers=1, policy=WATCHING)
    history = list(range(20))
    world.core.on_arrival(first := world.arrival(history, session="a"))
    world.core.on_finish(Finish(1.0, first.request_id, output_tokens=3))
    world.core.on_worker(WorkerChange(2.0, 0, "gone"))
    world.join(1)
    for number in range(3):
        world.core.on_arrival(running := world.arrival([50 + number] * 3, now_s=3.0))
    new = world.arrival([70] * 8, now_s=3.5)
    cold = world.arrival([*history, 21], session="a", now_s=4.0)
    assert isinstance(world.core.on_arrival(new)[0], Hold)
    assert isinstance(world.core.on_arrival(cold)[0], Hold)
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("cold", -1)
    assert world.core.held.standings() == {"new": 1, "cold": 1}
    (action,) = world.core.on_finish(Finish(5.0, running.request_id))
    assert isinstance(action, Dispatch)
    assert action.request_id == cold.request_id


def test_a_session_without_events_is_assumed_to_be_cached_at_its_worker() -> None:
    world = World(workers=1, policy=WATCHING)
    history = list(range(20))
    world.core.on_arrival(first := world.arrival(history, session="a"))
    world.core.on_finish(Finish(1.0, first.request_id, output_tokens=3))
    world.core.on_tick(Tick(100.0))  # what was expected is forgotten, and no event ever came
    world.core.session_tracking.sessions.hazard._returns[:] = 2.0  # type: ignore[union-attr]
    world.core.on_arrival(world.arrival([*history, 21], session="a", now_s=101.0))
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("warm", 0)


def test_a_held_request_of_a_warm_session_keeps_its_home_worker() -> None:
    """A session's request waits for the worker with its cache if the policy holds it until that
    worker has room.
    """
    world = World(workers=1, policy=WATCHING)
    history = list(range(20))
    world.core.on_arrival(first := world.arrival(history, session="a"))
    world.core.on_finish(Finish(1.0, first.request_id, output_tokens=3))
    for number in range(3):
        world.core.on_arrival(world.arrival([50 + number] * 3, now_s=1.5))
    held = world.core.on_arrival(world.arrival([*history, 21], session="a", now_s=2.0))
    assert isinstance(held[0], Hold)
    assert world.core.held.standings() == {"warm": 1}
    world.core.on_tick(Tick(3.0))
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("warm", 0)


def test_a_restarted_router_distinguishes_old_sessions_from_new_ones() -> None:
    """A restarted router recognizes old sessions by blocks that only one worker holds; several
    workers hold a system prompt.
    """
    world = World(workers=3, policy=WATCHING)
    ours = [*SYSTEM, *range(20, 40)]
    world.events(0, 0, stored(ours))
    world.events(1, 0, stored([*SYSTEM, 77, 78]))
    world.core.on_arrival(world.arrival([*ours, 41], session="a"))
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("warm", 0)
    world.core.on_arrival(world.arrival([*SYSTEM, 50, 51, 52], session="b"))
    assert (SEEN[-1].standing, SEEN[-1].home_id) == ("new", -1)
    world.core.on_arrival(world.arrival([*ours[:14], *range(60, 90)], session="c"))
    assert SEEN[-1].standing == "new"  # a small part of it is no cache


def test_a_prompt_for_an_unserved_model_creates_no_session() -> None:
    world = World(policy=WATCHING)
    for chains in ({}, {BLOCK: chain_of([1, 2])}):
        (action,) = world.core.on_arrival(world.arrival([1, 2], model="other", chains=chains))
        assert isinstance(action, Reject)
        assert world.core.session_tracking.sessions is not None
        assert len(world.core.session_tracking.sessions) == 0


def test_a_retry_moves_the_session_to_the_new_worker() -> None:
    world = World(workers=2, policy=WATCHING)
    (sent,) = world.core.on_arrival(first := world.arrival(list(range(8)), session="a"))
    assert isinstance(sent, Dispatch)
    failure = Failure(1.0, first.request_id, "worker", retry=True, reason="reset")
    (again,) = world.core.on_failure(failure)
    assert isinstance(again, Dispatch)
    assert again.worker_id != sent.worker_id
    sessions = world.core.session_tracking.sessions
    assert sessions is not None
    homes = [sessions.sets.private_tokens[w.slot] for w in world.core.workers]
    assert homes[again.worker_id] == 8 * BLOCK
    assert homes[sent.worker_id] == 0.0
    world.core.on_first_token(FirstToken(1.5, first.request_id))
    world.core.on_load_report(LoadReport(1.6, again.worker_id, 1, 0, 32.0))
    world.core.on_finish(Finish(2.0, first.request_id, output_tokens=10))
    assert sessions.sets.private_tokens.sum() == 8 * BLOCK + 10


def test_workers_of_other_block_sizes_see_the_same_sessions() -> None:
    world = World(workers=0, policy=WATCHING)
    world.join(0, block_size=8)
    world.join(1, block_size=16)
    tokens = np.arange(300, dtype=np.int32)

    def ask(length: int, now_s: float) -> RequestView:
        chains = {size: chain_hashes(tokens[:length], size) for size in (8, 16)}
        arrival = world.arrival([1], chains=chains, prompt_tokens=length, now_s=now_s)
        (action,) = world.core.on_arrival(arrival)
        assert isinstance(action, Dispatch)
        world.core.on_finish(Finish(now_s, arrival.request_id, output_tokens=4))
        return SEEN[-1]

    assert [ask(200, 0.0).standing, ask(300, 1.0).standing] == ["new", "warm"]


def test_wanted_tokens_are_known_for_each_worker_if_sessions_are_tracked() -> None:
    world = World(workers=2, policy=WATCHING)
    core = world.core
    (action,) = core.on_arrival(world.arrival([*SYSTEM, 1, 2, 3, 4], session="a"))
    assert isinstance(action, Dispatch)
    core.on_tick(Tick(0.1))
    wanted = {w.worker_id: core.session_tracking.wanted_tokens(w.slot) for w in core.workers}
    assert wanted == {action.worker_id: 16.0 * BLOCK, 1 - action.worker_id: 0.0}
    core.set_policy(load("hybrid"))
    assert all(
        np.isnan(core.session_tracking.wanted_tokens(worker.slot)) for worker in core.workers
    )


@pytest.mark.parametrize(
    ("most", "reported", "refused", "tokens"),
    [(None, None, False, 200), (60, None, False, 60), (60, 7, False, 7), (60, None, True, 0)],
)
def test_the_tokens_of_an_uncounted_answer_are_estimated_from_its_time(
    most: int | None, reported: int | None, refused: bool, tokens: int
) -> None:
    """The tokens of an answer that another data plane carries, which nobody counts, are estimated
    from its time; otherwise policies would not know how long a turn is.
    """
    world = World(workers=1, policy="warmset")
    world.join(0, step_s=0.02)
    arrival = world.arrival([1, 2], stream=False, session="s", max_output_tokens=most)
    (dispatch,) = world.core.on_arrival(arrival)
    assert isinstance(dispatch, Dispatch)
    for world.now_s in (1.0, 2.0, 3.0, 5.0):  # the model has its prefill over within a second
        world.core.on_tick(Tick(world.now_s))
    finish = Finish(world.now_s, arrival.request_id, output_tokens=reported, refused=refused)
    world.core.on_finish(finish)
    assert world.core.session_tracking.sessions is not None
    assert world.core.session_tracking.sessions.cycle.output_tokens == tokens


def test_a_refused_prompt_does_not_count_as_wanted_at_the_worker() -> None:
    """A session whose prompt a worker refused because its memory is too small does not count as if
    it were in that worker's cache.
    """
    core = World(workers=1, policy=WATCHING).core
    arrival = World().arrival([1, 2, 3, 4], session="long")
    core.on_arrival(arrival)
    wanted = core.session_tracking.wanted_tokens
    assert wanted(0) == 4.0 * BLOCK
    core.on_finish(Finish(0.0, arrival.request_id, refused=True))
    core.on_tick(Tick(1.0))
    assert wanted(0) == 0.0
